"""Our regions against SkyRL's own policy losses: the same mini-batch, the same settings, the same gradient."""

import pytest

pytest.importorskip("skyrl")

import torch
from skyrl.train.config import AlgorithmConfig
from skyrl.train.config.config import CISPOConfig, DPPOConfig, OffPolicyCorrectionConfig, SAPOConfig

from support import skyrl_world as world

LARGEST_ERROR = 1e-6
OLD = {"anchor": "proximal"}
"""SkyRL's losses but `dppo` and `rollout_is` are anchored on what the trainer recomputed."""

CASES = {
    "dppo by total variation": (
        {"policy_loss_type": "dppo", "dppo": DPPOConfig(dppo_type="binary_tv", delta_low=0.05, delta_high=0.08)},
        "dppo-binary-tv", {"divergence": {"max_decrease": 0.05, "max_increase": 0.08}},
    ),
    "dppo by kl": (
        {"policy_loss_type": "dppo", "dppo": DPPOConfig(dppo_type="binary_kl", delta_low=0.01, delta_high=0.02)},
        "dppo-binary-kl", {"divergence": {"max_decrease": 0.01, "max_increase": 0.02}},
    ),
    "ppo": ({"policy_loss_type": "regular", "eps_clip_low": 0.2, "eps_clip_high": 0.28}, "ppo", OLD),
    "ppo with dual clip": (
        {"policy_loss_type": "dual_clip", "eps_clip_low": 0.1, "eps_clip_high": 0.2, "clip_ratio_c": 1.4},
        "ppo", OLD | {"ratio": {"max_decrease": 0.1, "max_increase": 0.2}, "dual_clip": 1.4},
    ),
    "gspo": (
        {"policy_loss_type": "gspo", "loss_reduction": "sequence_mean", "eps_clip_low": 0.003, "eps_clip_high": 0.004},
        "gspo", OLD | {"ratio": {"max_decrease": 0.003, "max_increase": 0.004}},
    ),
    "sapo": (
        {"policy_loss_type": "sapo", "loss_reduction": "sequence_mean", "sapo": SAPOConfig(tau_pos=1.5, tau_neg=2.0)},
        "sapo", OLD | {"temperature_positive": 1.5, "temperature_negative": 2.0},
    ),
    "cispo": (
        {"policy_loss_type": "cispo", "cispo": CISPOConfig(cispo_eps_clip_low=1.0, cispo_eps_clip_high=0.5)},
        "cispo", OLD | {"max_ratio": 1.5},
    ),
    "ppo with truncated importance sampling": (
        {"policy_loss_type": "regular", "eps_clip_low": 0.2, "eps_clip_high": 0.28,
         "off_policy_correction": OffPolicyCorrectionConfig(tis_ratio_type="token", token_tis_ratio_clip_high=1.2)},
        "ppo", OLD | {"correction": {"kind": "tis", "max_ratio": 1.2}},
    ),
}  # fmt: skip


def harmless(tokens):
    """SkyRL's losses pass on what stands outside the loss; see docs/results/losses.md."""
    mask = tokens.loss_mask.bool()
    return tokens._replace(
        **{
            name: torch.where(mask, getattr(tokens, name), -1.0)
            for name in ("log_probs", "old_log_probs", "rollout_logprobs")
        }
    )


@pytest.mark.parametrize("name", CASES)
def test_a_region_is_skyrls_own_loss(name):
    theirs, preset, region = CASES[name]
    reduction = theirs.get("loss_reduction", "token_mean")
    tokens = world.scaled(harmless(world.batch()), reduction)
    ours = world.algorithm(f"trustrl-{preset}", region=region, loss_reduction=reduction)
    found, wanted = world.result(ours, tokens), world.result(AlgorithmConfig(**theirs), tokens)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR


@pytest.mark.parametrize("name", ["dppo by total variation", "dppo by kl", "ppo"])
def test_what_is_stopped_has_skyrls_name_and_value(name):
    theirs, preset, region = CASES[name]
    tokens = world.scaled(harmless(world.batch()), "token_mean")
    found = world.result(world.algorithm(f"trustrl-{preset}", region=region), tokens)
    wanted = world.result(AlgorithmConfig(**theirs), tokens)
    assert found.metrics["clip_ratio"] == pytest.approx(wanted.metrics["clip_ratio"], abs=1e-6)
    assert found.metrics["clip_ratio"] > 0.02


def test_skyrls_dppo_takes_the_trainers_policy_for_a_missing_sampler():
    """Ours does not: another anchor is another algorithm."""
    tokens = harmless(world.batch())._replace(rollout_logprobs=None)
    theirs = world.result(AlgorithmConfig(policy_loss_type="dppo"), tokens)
    assert theirs.gradient.abs().sum() > 0
    with pytest.raises(ValueError, match="rollout_logprobs must be given with dppo"):
        world.result(world.algorithm("trustrl-dppo-binary-tv"), tokens)


def test_skyrls_dppo_counts_the_mismatch_twice_under_its_correction():
    """π/μ times π'/μ. Ours refuses the pair."""
    tokens = harmless(world.batch())
    corrected = OffPolicyCorrectionConfig(tis_ratio_type="token", token_tis_ratio_clip_high=100.0)
    once = world.result(AlgorithmConfig(policy_loss_type="dppo"), tokens).gradient
    twice = world.result(AlgorithmConfig(policy_loss_type="dppo", off_policy_correction=corrected), tokens).gradient
    torch.testing.assert_close(twice, once * (tokens.old_log_probs - tokens.rollout_logprobs).exp())
    with pytest.raises(ValueError, match="off_policy_correction must be off"):
        world.result(world.algorithm("trustrl-dppo-binary-tv", off_policy_correction=corrected), tokens)

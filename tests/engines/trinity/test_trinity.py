"""Regions in Trinity-RFT's own registries, key mapping and calls, next to its own losses."""

import pytest
import torch

import trustrl
from support import parity
from trustrl.errors import ConfigError, MissingDataError
from trustrl.regions.recommended import SAMPLED_TOKEN

algorithm = pytest.importorskip("trinity.algorithm")
config_module = pytest.importorskip("trinity.common.config")

WAY = "trustrl.engines.trinity"
BEHAVIOR_ONLY = [name for name in parity.PRESETS if trustrl.preset(name).needs().anchors == {"behavior"}]
MODES = {
    "token-mean": parity.token_mean,
    "seq-mean-token-mean": parity.sequence_mean,
    "seq-mean-token-sum": lambda mask: mask.double() / len(mask),
    "seq-mean-token-sum-norm": lambda mask: mask.double() / mask.shape[1],
}


def loss_of(path, mode, backend="verl", **arguments):
    """A loss as Trinity's trainers make it: from the registry, by the setting's value."""
    return algorithm.POLICY_LOSS_FN.get(path)(backend=backend, loss_agg_mode=mode, **arguments)


def gradient_by(loss):
    """Calls the loss as `TrinityPolicyLoss` does: the keys it selects, by verl's names."""

    def gradient(batch):
        columns = {
            "response_mask": batch.in_loss,
            "old_log_probs": batch.behavior_logp,
            "rollout_log_probs": batch.behavior_logp,
            "advantages": batch.advantage,
            "ref_log_prob": batch.logp.detach(),
        }
        if "rollout_log_probs" in loss.select_keys:
            columns["old_log_probs"] = batch.proximal_logp
        assert set(loss.select_keys) <= columns.keys()
        value, metrics = loss(logprob=batch.logp, **columns)
        value.backward()
        assert all(type(metric) is float for metric in metrics.values())
        assert "trustrl/masked_share" in metrics
        return batch.logp.grad

    return gradient


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BEHAVIOR_ONLY)
def test_a_region_on_the_samplers_record_has_the_oracles_verdicts_and_gradient(name, mode):
    if name in parity.PER_SEQUENCE and mode != "seq-mean-token-mean":
        with pytest.raises(ConfigError, match=f"loss_agg_mode must be seq-mean-token-mean with {name}"):
            loss_of(f"{WAY}.RegionLoss", mode, region=name)
        return
    parity.check(name, gradient_by(loss_of(f"{WAY}.RegionLoss", mode, region=name)), MODES[mode])


@pytest.mark.parametrize("name", parity.PRESETS)
def test_a_region_with_both_anchors_has_the_oracles_verdicts_and_gradient(name):
    mode = "seq-mean-token-mean"
    parity.check(name, gradient_by(loss_of(f"{WAY}.RecomputedRegionLoss", mode, region=name)), MODES[mode])


def test_the_tinker_backend_calls_the_loss_with_one_sequence_and_trinitys_names():
    loss = loss_of(f"{WAY}.RegionLoss", "token-mean", backend="tinker", region="dppo-binary-tv")
    batch = parity.read("dppo-binary-tv").batch
    logp = batch.logp[0].clone().requires_grad_(True)
    value, _ = loss(
        logprob=logp, old_logprob=batch.behavior_logp[0], action_mask=batch.in_loss[0], advantages=batch.advantage[0],
        total_length=12,
    )  # fmt: skip
    value.backward()
    factors = parity.read("dppo-binary-tv").factors[0]
    wanted = -factors * batch.advantage[0] * batch.in_loss[0] / batch.in_loss[0].sum()
    torch.testing.assert_close(logp.grad.double(), wanted, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("theirs", "arguments", "region"),
    [
        ("ppo", {"clip_range_low": 0.2, "clip_range_high": 0.28, "clip_ratio_c": 3.0}, {"preset": "ppo", "dual_clip": 3.0}),
        ("gspo", {"clip_range_low": 0.0003, "clip_range_high": 0.0004}, "gspo"),
    ],
)  # fmt: skip
def test_a_region_is_trinitys_own_loss_with_the_same_rule(theirs, arguments, region):
    mode = "seq-mean-token-mean" if theirs == "gspo" else "token-mean"
    gradients = []
    for loss in (loss_of(theirs, mode, **arguments), loss_of(f"{WAY}.RegionLoss", mode, region=region)):
        batch = parity.read("gspo" if theirs == "gspo" else "ppo").batch
        logp = batch.logp.clone().requires_grad_(True)
        value, _ = loss(
            logprob=logp, old_log_probs=batch.behavior_logp, response_mask=batch.in_loss, advantages=batch.advantage
        )
        value.backward()
        gradients.append(logp.grad)
    scale = gradients[0].abs().max()
    assert scale > 0
    assert (gradients[0] - gradients[1]).abs().max() / scale < 1e-6


def test_a_region_that_the_loss_cannot_feed_is_refused_by_name():
    with pytest.raises(ConfigError, match="must not read the proximal log-probs in Trinity, got minirl"):
        loss_of(f"{WAY}.RegionLoss", "token-mean", region="minirl")
    with pytest.raises(ConfigError, match="must read only sampled tokens in Trinity, got troll"):
        loss_of(f"{WAY}.RegionLoss", "token-mean", region="troll")
    with pytest.raises(ConfigError, match="backend must be verl"):
        loss_of(f"{WAY}.RecomputedRegionLoss", "token-mean", backend="tinker", region="minirl")
    with pytest.raises(ConfigError, match=r"loss_agg_mode must be given"):
        loss_of(f"{WAY}.RegionLoss", None, region="ppo")
    with pytest.raises(ConfigError, match=r"policy_loss_fn_args\.region must be"):
        loss_of(f"{WAY}.RegionLoss", "token-mean")


def test_a_missing_record_is_refused():
    batch = parity.read("ppo").batch
    loss = loss_of(f"{WAY}.RegionLoss", "token-mean", region="ppo")
    with pytest.raises(MissingDataError, match=r"old_logprob must be given with ppo, got None\. Set algorithm\.bypass"):
        loss(logprob=batch.logp, old_log_probs=None, response_mask=batch.in_loss, advantages=batch.advantage)


def settings(**changes):
    config = config_module.Config()
    config.algorithm.algorithm_type = f"{WAY}.RegionGRPO"
    for way, value in changes.items():
        *owners, field = way.split("__")
        owner = config
        for name in owners:
            owner = getattr(owner, name)
        assert hasattr(owner, field)
        setattr(owner, field, value)
    return config


def test_trinitys_validator_takes_the_algorithm_and_its_loss_by_their_paths():
    validator = pytest.importorskip("trinity.common.config_validator")
    config = settings(algorithm__loss_agg_mode="seq-mean-token-mean")
    validator.AlgorithmConfigValidator().validate(config)
    assert config.algorithm.policy_loss_fn == f"{WAY}.RegionLoss"
    assert config.algorithm.policy_loss_fn_args == {"region": SAMPLED_TOKEN, "loss_agg_mode": "seq-mean-token-mean"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__bypass_old_logprobs": False}, "bypass_old_logprobs must be True with RegionLoss, got False"),
        ({"algorithm__policy_loss_fn": f"{WAY}.RecomputedRegionLoss"}, "bypass_old_logprobs must be False"),
        ({"algorithm__policy_loss_fn": "ppo"}, r"algorithm\.policy_loss_fn must be"),
        ({"algorithm__rollout_correction": {"rollout_is": "token"}}, "rollout_correction must be unset"),
        ({"model__top_p": 0.9}, r"model\.top_p must be 1\.0, got 0\.9"),
        ({"explorer__rollout_model__top_k": 20}, r"explorer\.rollout_model\.top_k must be -1, got 20"),
        ({"model__repetition_penalty": 1.1}, r"model\.repetition_penalty must be 1\.0"),
        ({"explorer__rollout_model__temperature": 0.7}, "different temperatures"),
    ],
)  # fmt: skip
def test_settings_that_remove_an_anchor_or_count_twice_are_refused_at_the_start(changes, message):
    checked = algorithm.ALGORITHM_TYPE.get(f"{WAY}.RegionGRPO")
    checked.check_config(settings())
    with pytest.raises(ConfigError, match=message):
        checked.check_config(settings(**changes))

"""Our regions against verl's own policy losses: the same micro-batch, the same settings, the same gradient."""

from typing import Any, NamedTuple

import pytest

pytest.importorskip("verl")

import torch

from support import verl_world as world

LARGEST_ERROR = 1e-6
NO_CAP = 1e6


class Case(NamedTuple):
    """One of verl's losses with its settings, and the region that is the same."""

    theirs: str
    settings: dict[str, Any]
    ours: str
    region: dict[str, Any]
    modes: tuple[str, ...] = world.MODES
    noise: float = 0.5
    policy_loss: dict[str, Any] = {}
    stops: bool = True


CASES = {
    "dppo by total variation": Case(
        "dppo_tv", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "clip_ratio_c": NO_CAP},
        "trustrl-dppo-binary-tv", {"divergence": {"max_decrease": 0.05, "max_increase": 0.08}},
    ),
    "dppo by total variation, weights capped": Case(
        "dppo_tv", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "clip_ratio_c": 1.5},
        "trustrl-dppo-binary-tv", {"divergence": {"max_decrease": 0.05, "max_increase": 0.08}, "max_ratio": 1.5},
    ),
    "dppo by kl": Case(
        "dppo_kl", {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": NO_CAP},
        "trustrl-dppo-binary-kl", {"divergence": {"max_decrease": 0.01, "max_increase": 0.02}},
    ),
    "ppo": Case(
        "vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": NO_CAP}, "trustrl-ppo", {},
    ),
    "ppo with dual clip": Case(
        "vanilla", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2, "clip_ratio_c": 1.4},
        "trustrl-ppo", {"ratio": {"max_decrease": 0.1, "max_increase": 0.2}, "dual_clip": 1.4},
    ),
    "gspo": Case(
        "gspo", {"clip_ratio_low": 0.008, "clip_ratio_high": 0.009},
        "trustrl-gspo", {"ratio": {"max_decrease": 0.008, "max_increase": 0.009}}, world.PER_SEQUENCE, noise=0.1,
    ),
    "cispo": Case(
        "cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 0.5}, "trustrl-cispo", {"max_ratio": 1.5}, stops=False,
    ),
    "sapo": Case(
        "sapo", {"tau_pos": 1.5, "tau_neg": 2.0},
        "trustrl-sapo", {"temperature_positive": 1.5, "temperature_negative": 2.0}, world.PER_SEQUENCE, stops=False,
    ),
    "reinforce in bypass mode": Case(
        "bypass_mode", {}, "trustrl-cispo", {"max_ratio": 1.5}, stops=False,
        policy_loss={"rollout_correction": {
            "loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.5,
        }},
    ),
}  # fmt: skip


def compared(case: Case, mode: str, info: dict[str, Any]) -> tuple[world.Result, world.Result]:
    tokens = world.batch(noise=case.noise)
    ours = world.actor(case.ours, info=info, policy_loss={"region": case.region})
    theirs = world.actor(case.theirs, info=info, policy_loss=case.policy_loss, **case.settings)
    return world.result(ours, tokens, mode=mode), world.result(theirs, tokens, mode=mode)


@pytest.mark.parametrize("info", [world.LOCAL, world.GLOBAL], ids=["one rank", "four ranks"])
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in CASES for mode in CASES[name].modes])
def test_a_region_is_verls_own_loss(name, mode, info):
    found, wanted = compared(CASES[name], mode, info)
    stopped = found.metrics["trustrl/masked_share"]
    assert (0.05 < stopped < 0.6) if CASES[name].stops else stopped == 0
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].stops])
def test_what_is_stopped_has_verls_name_and_value(name):
    """Dual clip is verl's `pg_clipfrac_lower` and one of our stops, so there the two sides' sum is compared."""
    found, wanted = compared(CASES[name], CASES[name].modes[0], world.LOCAL)
    clipped = wanted.metrics["actor/pg_clipfrac"]
    if "dual_clip" in CASES[name].region:
        clipped += wanted.metrics["actor/pg_clipfrac_lower"]
    assert found.metrics["actor/pg_clipfrac"] == pytest.approx(clipped, abs=1e-6)
    assert found.metrics["actor/ppo_kl"] == pytest.approx(wanted.metrics["actor/ppo_kl"], rel=1e-5, abs=1e-7)
    assert set(wanted.metrics) <= set(found.metrics)


@pytest.mark.parametrize("bounds", [(0.4, 0.4), (0.1, 0.15)])
def test_gmpo_is_verls_geo_mean(bounds):
    """verl averages over the rows of a micro-batch, whatever the mode, and reads clip_ratio as nats of the log-ratio.

    Its sequences have one advantage, as GMPO is defined, and rows without a token are left out: verl counts them.
    """
    tokens = world.batch(noise=0.5)
    tokens = tokens.rows(*tokens.response_mask.any(1).nonzero().flatten().tolist())
    tokens.advantages[:] = tokens.advantages[:, :1]
    low, high = bounds
    region = {"log_ratio": {"max_decrease": low, "max_increase": high}}
    ours = world.actor("trustrl-gmpo", policy_loss={"region": region})
    theirs = world.actor("geo_mean", clip_ratio_low=low, clip_ratio_high=high)
    found, wanted = (world.result(one, tokens, mode="seq-mean-token-mean") for one in (ours, theirs))
    assert 0.02 < found.metrics["trustrl/masked_share"] < 0.6
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR
    assert found.metrics["actor/ppo_kl"] == pytest.approx(wanted.metrics["actor/ppo_kl"], rel=1e-5, abs=1e-7)


def test_verls_correction_multiplies_a_region_anchored_on_the_trainer():
    tokens = world.batch()
    weights = torch.rand(tokens.log_prob.shape, generator=torch.Generator().manual_seed(1)) + 0.5
    region = {"anchor": "proximal"}
    found = world.result(world.actor("trustrl-ppo", policy_loss={"region": region}), tokens, is_weights=weights)
    theirs = world.actor("vanilla", clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=NO_CAP)
    wanted = world.result(theirs, tokens, is_weights=weights)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR
    assert world.error(found.gradient, world.result(theirs, tokens).gradient) > 0.05


@pytest.mark.parametrize("mode", world.MODES)
def test_ranks_and_micro_batches_add_up_to_the_whole_batch(mode):
    """Two ranks with two micro-batches each: gradients add within a rank and average over ranks, as verl's do."""
    whole = world.batch()
    mask = whole.response_mask
    counts = {
        "batch_num_tokens": mask.sum().item(),
        "global_batch_size": int(mask.any(1).sum()),
        "loss_scale_factor": 24,
    }
    alone = world.result(world.actor("trustrl-dppo-binary-tv", info=counts | {"dp_size": 1}), whole, mode=mode)
    shared = world.actor("trustrl-dppo-binary-tv", info=counts | {"dp_size": 2})
    parts = [(0, 5, 6), (1, 2, 3, 4, 7), (8, 9), (10, 11, 12, 13, 14, 15)]
    total = torch.zeros_like(alone.gradient)
    for rows in parts:
        total[list(rows)] = world.result(shared, whole.rows(*rows), mode=mode).gradient / 2
    assert world.error(total, alone.gradient) <= LARGEST_ERROR


# ── where verl differs on purpose, or by default ────────────────────────────────────────────────────────────────────


def test_verls_default_caps_dppos_weights_at_three():
    """Its code says 20, its configuration 3, and the configuration wins. The paper shows 3 failing."""
    tokens = world.batch(noise=1.5)
    wide = {"clip_ratio_low": 1.0, "clip_ratio_high": 1.0}
    free = world.actor(
        "trustrl-dppo-binary-tv", policy_loss={"region": {"divergence": {"max_increase": 1.0, "max_decrease": 1.0}}}
    )
    capped = world.actor(
        "trustrl-dppo-binary-tv",
        policy_loss={"region": {"divergence": {"max_increase": 1.0, "max_decrease": 1.0}, "max_ratio": 3.0}},
    )
    wanted = world.result(world.actor("dppo_tv", **wide), tokens).gradient
    assert world.error(world.result(free, tokens).gradient, wanted) > 0.05
    assert world.error(world.result(capped, tokens).gradient, wanted) <= LARGEST_ERROR


def test_verl_reads_ppos_clip_ratio_as_nats():
    """`clip_ratio` .2 where .05 nats is meant: verl's defaults allow four times the divergence of the paper."""
    tokens = world.batch(noise=1.5)
    theirs = world.result(world.actor("dppo_kl", clip_ratio_c=NO_CAP), tokens)
    paper = world.result(world.actor("trustrl-dppo-binary-kl"), tokens)
    nats = {"divergence": {"max_increase": 0.2, "max_decrease": 0.2}}
    same = world.result(world.actor("trustrl-dppo-binary-kl", policy_loss={"region": nats}), tokens)
    assert paper.metrics["actor/pg_clipfrac"] > 1.3 * theirs.metrics["actor/pg_clipfrac"]
    assert world.error(same.gradient, theirs.gradient) <= LARGEST_ERROR


def test_verls_cispo_also_raises_small_weights():
    """Its lower bound lifts a ratio of .1 to .8; the paper switches that side off, and our region has none."""
    tokens = world.batch(noise=1.0)
    ours = world.result(world.actor("trustrl-cispo", policy_loss={"region": {"max_ratio": 1.2}}), tokens).gradient
    theirs = world.result(world.actor("cispo"), tokens).gradient
    low = (tokens.log_prob - tokens.old_log_prob < -0.25) & tokens.response_mask
    high = (tokens.log_prob - tokens.old_log_prob > -0.2) & tokens.response_mask
    assert (theirs[low].abs() > ours[low].abs()).all()
    torch.testing.assert_close(ours[high], theirs[high])


def test_verls_sapo_ignores_the_average_it_is_given():
    """It always takes the mean of sequences; ours follows `loss_agg_mode`."""
    tokens = world.batch()
    theirs = [world.result(world.actor("sapo"), tokens, mode=mode).gradient for mode in world.MODES]
    ours = [world.result(world.actor("trustrl-sapo"), tokens, mode=mode).gradient for mode in world.MODES]
    assert all(torch.equal(gradient, theirs[0]) for gradient in theirs)
    assert world.error(ours[0], theirs[0]) > 0.05


def test_verl_counts_tokens_without_advantage_as_clipped():
    tokens = world.batch()._replace(advantages=torch.zeros(16, 24))
    settings = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
    assert world.result(world.actor("dppo_tv", **settings), tokens).metrics["actor/pg_clipfrac"] > 0.05
    assert world.result(world.actor("trustrl-dppo-binary-tv"), tokens).metrics["actor/pg_clipfrac"] == 0


def test_verls_clamp_silences_a_token_far_below_its_anchor():
    """A token that fell by e⁻²⁵ and is pulled back: its true weight e⁻²⁵ in ours, none at all through verl's clamp."""
    tokens = world.Batch(
        torch.full((1, 2), -0.1), torch.tensor([[-25.1, -0.1]]), torch.ones(1, 2), torch.ones(1, 2).bool()
    )
    theirs = world.result(world.actor("vanilla"), tokens, mode="token-sum").gradient[0, 0].item()
    ours = world.result(world.actor("trustrl-ppo"), tokens, mode="token-sum").gradient[0, 0].item()
    assert theirs == 0
    assert ours == pytest.approx(-torch.tensor(-25.0).exp().item(), rel=1e-5)

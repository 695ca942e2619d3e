"""The general region, and what all regions share: points on the axes, corrections, caps."""

from dataclasses import fields, replace

import pytest
import torch

import trustrl
from support.worlds import reduction_for, run, world
from trustrl import regions
from trustrl.core.records import FullDivergence
from trustrl.errors import MissingDataError


def on_the_axes(region):
    try:
        return region.axes()
    except (AttributeError, NotImplementedError):
        return None


PRESETS = {name: trustrl.preset(name) for name in trustrl.presets() if name != "ppo-relaxed"}  # a rule beside the axes
VARIANTS = {
    **PRESETS,
    "dppo, capped": regions.DPPO(regions.BinaryTV(max_increase=0.05), max_ratio=1.2),
    "dppo, corrected": regions.DPPO(anchor="proximal", correction=regions.TIS(max_ratio=1.1)),
    "ppo, textbook": regions.PPO(action="clip"),
    "ppo, capped": regions.PPO(max_ratio=1.1),
    "cispo, tight": regions.CISPO(max_ratio=1.05),
    "cppo, capped": regions.CPPO(regions.BinaryTV(max_increase=0.05), max_ratio=1.1),
    "trm, k2": regions.TRM(regions.SampledK2(max_increase=0.01)),
}
POINTS = {name: region for name, region in VARIANTS.items() if on_the_axes(region) is not None}
EQUAL = sorted(POINTS)


def test_most_presets_are_points_on_the_axes():
    assert len([name for name in PRESETS if name in POINTS]) > 15


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("drift", [0.1, 0.7], ids=["near", "far"])
def test_a_region_decides_as_its_point_on_the_axes(name, drift):
    w = world(3, drift=drift, rows=8)
    region = POINTS[name]
    reduction = reduction_for(region, w)
    (ours, policy), (point, other) = (run(one, w, reduction=reduction) for one in (region, region.axes()))
    assert torch.equal(ours.decision.keep, point.decision.keep)
    torch.testing.assert_close(ours.decision.weight, point.decision.weight, rtol=0, atol=0)
    torch.testing.assert_close(policy.logp.grad, other.logp.grad, rtol=0, atol=0)
    torch.testing.assert_close(ours.loss, point.loss, rtol=0, atol=0)


@pytest.mark.parametrize("level", ["sequence", "sequence-max"])
def test_levels_and_directions_of_the_axes_differ(level):
    w = world(3, drift=0.7, rows=8)
    statistic = regions.BinaryTV(max_increase=0.05)
    away, symmetric = (
        run(regions.TrustRegion(statistic, level=level, direction=direction), w)[0].decision.keep
        for direction in ("away", "symmetric")
    )
    token = run(regions.TrustRegion(statistic), w)[0].decision.keep
    assert not torch.equal(away, token)
    assert (symmetric <= away).all()
    assert (symmetric != away).any()


CORRECTED = sorted(
    name
    for name, region in PRESETS.items()
    if {"correction", "anchor"} <= {field.name for field in fields(region)} and name != "dppo-decoupled"
)


@pytest.mark.parametrize("name", CORRECTED)
def test_a_correction_multiplies_the_weight_of_every_region_by_the_capped_mismatch(name):
    w, cap = world(3, drift=0.2, rows=8), 1.05
    plain = replace(PRESETS[name], anchor="proximal", correction=None)
    reduction = reduction_for(plain, w)
    (before, _), (after, _) = (
        run(one, w, reduction=reduction) for one in (plain, replace(plain, correction=regions.TIS(max_ratio=cap)))
    )
    factor = (w.at_token(w.proximal) - w.at_token(w.behavior)).exp().clamp(max=cap)
    assert (factor == cap).any()
    on = w.in_loss & before.decision.keep
    torch.testing.assert_close(after.decision.weight[on], (before.decision.weight * factor)[on], rtol=1e-12, atol=0)
    assert torch.equal(after.decision.keep, before.decision.keep)


@pytest.mark.parametrize(
    "region",
    [
        pytest.param(regions.MiniRL(max_ratio=1.05), id="minirl"),
        pytest.param(regions.CPPO(regions.BinaryTV(max_increase=0.2), max_ratio=1.05), id="cppo"),
        pytest.param(regions.TRM(regions.SampledK2(max_increase=0.5), max_ratio=1.05), id="trm"),
    ],
)
def test_a_cap_bounds_the_weight(region):
    w = world(3, drift=0.2, rows=8)
    out, _ = run(region, w)
    ratio = (w.at_token(w.policy) - w.at_token(w.behavior)).exp()
    on = w.in_loss & out.decision.keep
    torch.testing.assert_close(out.decision.weight[on], ratio.clamp(max=1.05)[on], rtol=1e-12, atol=0)
    assert (ratio[on] > 1.05).any()


def test_trm_also_masks_sequences_by_their_mean():
    w = world(3, drift=0.2, rows=24)
    log_ratio = w.at_token(w.policy) - w.at_token(w.behavior)
    k3 = torch.where(w.in_loss, log_ratio.exp() - 1 - log_ratio, 0.0)
    mean = k3.sum(1) / w.in_loss.sum(1).clamp(min=1)
    bound = mean.median().item()
    wide = regions.SampledK2(max_increase=1e6)
    out, _ = run(regions.TRM(wide, mean=regions.SampledK3(max_increase=bound)), w)
    outside = (mean > bound)[:, None] & (w.advantage != 0) & w.in_loss
    assert torch.equal(~out.decision.keep & w.in_loss, outside)
    assert 0 < outside.sum() < (w.in_loss & (w.advantage != 0)).sum()
    assert (outside & (w.advantage * log_ratio < 0)).any()  # in both directions


def test_a_prefix_budget_reports_the_thresholds_of_its_divergence():
    region = regions.CPPO(regions.BinaryTV(max_increase=0.3))
    decision = run(region, world(3))[0].decision
    assert (decision.max_increase, decision.max_decrease) == (0.3, 0.3)


def test_a_penalty_on_the_axes_has_a_width_for_each_side_and_the_gap_of_its_statistic():
    w = world(3, drift=0.5)
    rises = w.at_token(w.policy) > w.at_token(w.behavior)
    sides = regions.TrustRegion(regions.Ratio(max_increase=0.3, max_decrease=0.1), action="penalize")
    weight, up, down = (run(one, w)[0].decision.weight for one in (sides, regions.SPO(0.3), regions.SPO(0.1)))
    torch.testing.assert_close(weight, torch.where(rises, up, down), rtol=1e-12, atol=0)
    gap = regions.TrustRegion(regions.BinaryTV(max_increase=0.4), action="penalize")
    weight, drpo = (run(one, w)[0].decision.weight for one in (gap, regions.DRPO(0.4)))
    torch.testing.assert_close(weight, drpo, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("statistic", "name"), [(regions.FullTV, "tv"), (regions.FullKL, "kl")])
def test_an_exact_divergence_may_be_given_instead_of_the_vocabulary(statistic, name):
    w = world(3, rows=8)
    region = regions.DPPO(statistic())
    whole, _ = run(region, w)
    rollout = w.rollout("behavior")
    policy, anchor = w.policy.exp(), w.behavior.exp()
    found = {"tv": (policy - anchor).abs().sum(-1) / 2, "kl": (anchor * (w.behavior - w.policy)).sum(-1)}
    other = {"tv": "kl", "kl": "tv"}[name]

    def given(**divergences):
        sides = {"of": "behavior", "tv": None, "kl": None, **divergences}
        tokens = replace(w.policy_tokens(rollout), full_logp=None, full_divergence=FullDivergence(**sides))
        return trustrl.policy_loss(tokens, replace(rollout, full=None), region, reduction=trustrl.TokenSum())

    out = given(**{name: found[name]})
    assert torch.equal(out.decision.keep, whole.decision.keep)
    torch.testing.assert_close(out.decision.divergence.lower, whole.decision.divergence.lower, rtol=1e-9, atol=1e-12)
    with pytest.raises(MissingDataError, match=rf"full_divergence\.{name} must be given for .*got None"):
        given(**{other: found[other]})


@pytest.mark.parametrize("level", ["sequence", "sequence-max"])
def test_a_cap_holds_at_the_level_of_sequences(level):
    w = world(3, drift=0.2, rows=8)
    out, _ = run(regions.TrustRegion(regions.BinaryTV(max_increase=0.5), level=level, max_ratio=1.05), w)
    ratio = (w.at_token(w.policy) - w.at_token(w.behavior)).exp()
    on = w.in_loss & out.decision.keep
    torch.testing.assert_close(out.decision.weight[on], ratio.clamp(max=1.05)[on], rtol=1e-12, atol=0)


def test_truncation_ignores_the_statistic():
    w = world(3, drift=0.5)
    region = regions.TrustRegion(None, action="truncate", max_ratio=1.1)
    out, _ = run(region, w)
    assert out.decision.keep.all()
    ratio = (w.at_token(w.policy) - w.at_token(w.behavior)).exp()
    torch.testing.assert_close(out.decision.weight[w.in_loss], ratio.clamp(max=1.1)[w.in_loss], rtol=1e-12, atol=0)


def test_a_sequences_side_is_the_sign_of_its_mean_log_ratio():
    w = world(3, drift=0.5, rows=8)
    out, _ = run("gspo", w)
    log_ratio = torch.where(w.in_loss, w.at_token(w.policy) - w.at_token(w.behavior), 0.0)
    mean = log_ratio.sum(1, keepdim=True) / w.in_loss.sum(1, keepdim=True).clamp(min=1)
    found = out.decision.side.reshape(w.in_loss.shape)[w.in_loss]
    torch.testing.assert_close(found, mean.expand_as(log_ratio)[w.in_loss], rtol=1e-9, atol=1e-12)


def test_a_prefix_budget_reads_the_end_that_acts():
    w = world(3, drift=0.3, rows=8)
    statistic = regions.TopKTV(k=4, max_increase=0.1)
    lower, upper = (
        run(regions.CPPO(replace(statistic, act_on=end)), w)[0].decision.keep[w.in_loss] for end in ("lower", "upper")
    )
    assert (upper <= lower).all()
    assert (upper != lower).any()

"""Stale tokens: dropped or held to a tighter bound, counted under their own name, and never without versions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import trustrl
from support.worlds import grad_of, reduction_for, world
from trustrl import regions
from trustrl.errors import ConfigError, MissingDataError

NOW, LIMIT = 9, 2
W = world(5, rows=6, width=20, drift=0.6, mismatch=0.2)
VERSION = NOW - torch.arange(W.tokens.numel()).reshape(W.tokens.shape) % 6  # ages 0 to 5, mixed in every sequence
STALE = VERSION < NOW - LIMIT
PRESETS = sorted(trustrl.presets())
DROPPING = {name: trustrl.preset(name) for name in PRESETS} | {
    # The presets' bounds mask every sequence of this batch.
    "trm": regions.TRM(regions.TopKKL(max_increase=2.0)),
    "flash-reinforce": trustrl.preset("flash-reinforce", max_increase=2.0),
    "trm-full-kl": regions.TRM(regions.FullKL(max_increase=2.0)),
    "trm-sampled": regions.TRM(regions.SampledK2(max_increase=2.0)),
}
TIGHTENING = {
    "dppo-binary-tv": lambda: regions.DPPO(regions.BinaryTV(max_increase=0.12, max_decrease=0.06)),
    "dppo-topk-kl": lambda: regions.DPPO(regions.TopKKL(max_increase=0.2, k=20), max_ratio=1.5),
    "ppo": lambda: regions.PPO(),
    "ppo, textbook": lambda: regions.PPO(action="clip"),
    "ipo": lambda: regions.IPO(),
    "kpop": lambda: regions.KPOP(regions.SymmetricBinaryKL(max_increase=0.15)),
    "minirl": lambda: regions.MiniRL(),
    "trust-region": lambda: regions.TrustRegion(regions.BinaryKL(max_increase=0.1), direction="symmetric"),
}


def run(region, *, version=VERSION, now=NOW):
    """Output and gradient at every leaf of the policy."""
    needs = region.needs()
    rollout = W.rollout(needs.anchor, k=min(needs.topk or 20, 48), version=version)
    if needs.topk > 48:
        region = replace(region, k=48)
    policy = replace(W.policy_tokens(rollout), version=now)
    out = trustrl.policy_loss(policy, rollout, region, reduction=reduction_for(region, W))
    out.loss.backward()
    return out, [grad_of(x) for x in (policy.logp, policy.topk_logp, policy.full_logp)]


@pytest.mark.parametrize("name", PRESETS)
def test_a_dropped_token_has_no_gradient_and_leaves_the_others_as_they_were(name):
    region = DROPPING[name]
    (plain, before), (out, after) = run(region), run(replace(region, max_staleness=LIMIT))
    assert (before[0][W.in_loss & STALE] != 0).any()
    for old, new in zip(before, after, strict=True):
        stale = STALE.reshape(*STALE.shape, *(1,) * (old.ndim - 2))
        torch.testing.assert_close(new, old.masked_fill(stale, 0.0), rtol=0, atol=0)
    assert torch.equal(out.decision.keep | STALE, plain.decision.keep | STALE)


@pytest.mark.parametrize("name", ["dppo-binary-tv", "troll", "gspo"])
def test_ages_at_the_limit_are_fresh(name):
    region = trustrl.preset(name)
    plain, out = run(region)[1], run(replace(region, max_staleness=5))[1]
    assert all(torch.equal(old, new) for old, new in zip(plain, out, strict=True))


def test_a_dropped_token_adds_nothing_to_the_textbook_value():
    region = regions.PPO(action="clip")
    fresh = replace(W, in_loss=W.in_loss & ~STALE)
    rollout = fresh.rollout()
    want = trustrl.policy_loss(fresh.policy_tokens(rollout), rollout, region, reduction=trustrl.TokenSum())
    torch.testing.assert_close(run(replace(region, max_staleness=LIMIT))[0].loss, want.loss, rtol=1e-12, atol=0)


def scaled(region, factor):
    """The region with every bound divided by a factor."""
    name = (
        "statistic"
        if isinstance(region, regions.TrustRegion)
        else "ratio"
        if hasattr(region, "ratio")
        else "divergence"
    )
    statistic = getattr(region, name)
    low, high = statistic.bounds
    return replace(region, **{name: replace(statistic, max_decrease=low / factor, max_increase=high / factor)})


@pytest.mark.parametrize("name", TIGHTENING)
def test_a_stale_token_is_decided_by_the_bound_divided_by_one_plus_its_excess_age(name):
    region = TIGHTENING[name]()
    out, (gradient, *_) = run(replace(region, max_staleness=LIMIT, when_stale="tighten"))
    plain = run(region)[0].decision
    masked_more = 0
    for age in range(6):
        at = (NOW - age == VERSION) & W.in_loss
        other, (want, *_) = run(scaled(region, 1 + max(0, age - LIMIT)))
        assert torch.equal(out.decision.keep[at], other.decision.keep[at])
        torch.testing.assert_close(gradient[at], want[at], rtol=1e-12, atol=0)
        if out.decision.value is not None:
            torch.testing.assert_close(out.decision.value[at], other.decision.value[at], rtol=1e-12, atol=1e-15)
        low = torch.as_tensor(other.decision.max_increase, dtype=torch.float64).expand(int(at.sum()))
        torch.testing.assert_close(out.decision.max_increase[at], low, rtol=1e-12, atol=0)
        masked_more += int((plain.keep & ~out.decision.keep)[at].sum())
    assert masked_more > 0
    assert (out.decision.keep <= plain.keep).all()


@pytest.mark.parametrize("when", ["drop", "tighten"])
def test_stale_tokens_are_counted_under_their_own_name(when):
    found = trustrl.rates(run(regions.DPPO(max_staleness=LIMIT, when_stale=when))[0].sums)
    assert found["trustrl/stale_share"] == pytest.approx(float(STALE[W.in_loss].double().mean()))
    assert found["trustrl/dropped_share"] == 0  # a fault, which staleness is not


def test_the_undecided_share_uses_the_tighter_bound():
    out = run(regions.DPPO(regions.TopKTV(max_increase=0.3, k=5), max_staleness=LIMIT, when_stale="tighten"))[0]
    lower, upper = (end.numpy() for end in out.decision.divergence)
    bound = 0.3 / (1 + np.maximum(0, NOW - VERSION.numpy() - LIMIT))
    want = ((lower <= bound) & (bound < upper))[W.in_loss.numpy()].mean()
    assert 0 < want < 1
    assert trustrl.rates(out.sums)["trustrl/undecided_share"] == pytest.approx(want)


def test_staleness_adds_up_over_micro_batches_and_ranks():
    region, parts = regions.DPPO(), []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = replace(
            W,
            **{
                name: getattr(W, name)[rows]
                for name in ("behavior", "proximal", "policy", "tokens", "advantage", "in_loss")
            },
        )
        rollout = part.rollout(version=VERSION[rows])
        policy = replace(part.policy_tokens(rollout), version=NOW)
        sums = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum()).sums
        parts.append(sums.unflat(*sums.flat()))
    ages = (NOW - VERSION)[W.in_loss].double()
    for sums in (parts[0] + parts[1] + parts[2], run(region)[0].sums):
        found = trustrl.rates(sums)
        assert found["trustrl/staleness_mean"] == pytest.approx(float(ages.mean()), rel=1e-12)
        assert found["trustrl/staleness_max"] == float(ages.max()) == 5.0


def test_a_token_outside_the_loss_has_no_age():
    version = torch.where(W.in_loss, NOW, -1)
    found = trustrl.rates(run(regions.DPPO(max_staleness=0), version=version)[0].sums)
    assert found["trustrl/staleness_max"] == found["trustrl/staleness_mean"] == found["trustrl/stale_share"] == 0


@pytest.mark.parametrize(("version", "now"), [(None, NOW), (VERSION, None)], ids=["sampler's", "trainer's"])
def test_a_missing_version_is_an_error_that_names_both_fields(version, now):
    with pytest.raises(MissingDataError, match=r"RolloutTokens.version and PolicyTokens.version must be given.*None"):
        run(regions.DPPO(max_staleness=1), version=version, now=now)
    run(regions.DPPO(), version=version, now=now)


@pytest.mark.parametrize("name", [name for name in PRESETS if trustrl.preset(name).kind in {
    "troll", "gspo", "cispo", "sapo", "spo", "drpo", "cppo", "trm", "pg-is", "opsm", "gmpo",
    "vespo", "m2po",
}])  # fmt: skip
def test_a_region_without_a_bound_per_token_cannot_be_tightened(name):
    with pytest.raises(ConfigError, match="when_stale must be 'drop', got 'tighten'"):
        replace(trustrl.preset(name), max_staleness=1, when_stale="tighten")


def test_settings_survive_a_round_trip():
    region = regions.DPPO(max_staleness=3, when_stale="tighten")
    assert trustrl.config_from_dict(trustrl.config_to_dict(region)) == region

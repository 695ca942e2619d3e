"""What each verdict depends on, as tables in words."""

import math

import pytest
import torch

import trustrl
from support.worlds import log
from trustrl import regions


def verdict(region, policy, behavior, advantage, **extra):
    """(keep, gradient) of a single token."""
    logp = torch.tensor([[log(policy)]], dtype=torch.float64, requires_grad=True)
    rollout = trustrl.RolloutTokens(
        behavior_logp=torch.tensor([[log(behavior)]], dtype=torch.float64),
        proximal_logp=torch.tensor([[log(extra.pop("proximal", behavior))]], dtype=torch.float64),
        advantage=torch.tensor([advantage], dtype=torch.float64),
        in_loss=torch.ones(1, 1, dtype=torch.bool),
        **extra,
    )
    out = trustrl.policy_loss(trustrl.PolicyTokens(logp=logp), rollout, region, reduction=trustrl.TokenSum())
    out.loss.backward()
    return bool(out.decision.keep), float(logp.grad), out


TABLE = [
    pytest.param(0.70, 0.40, +1.0, False, id="risen too far and still pushed up"),
    pytest.param(0.70, 0.40, -1.0, True, id="risen too far but pulled back"),
    pytest.param(0.70, 0.40, 0.0, True, id="risen too far, no advantage, nothing to stop"),
    pytest.param(0.50, 0.40, +1.0, True, id="risen a little and pushed up"),
    pytest.param(0.50, 0.40, -1.0, True, id="risen a little and pulled back"),
    pytest.param(0.40, 0.70, -1.0, False, id="fallen too far and still pushed down"),
    pytest.param(0.40, 0.70, +1.0, True, id="fallen too far but pulled back"),
    pytest.param(0.40, 0.70, 0.0, True, id="fallen too far, no advantage, nothing to stop"),
    pytest.param(0.60, 0.70, -1.0, True, id="fallen a little and pushed down"),
    pytest.param(0.60, 0.70, +1.0, True, id="fallen a little and pulled back"),
    pytest.param(3e-4, 1e-4, +1.0, True, id="a rare token may triple: PPO would have clipped it"),
    pytest.param(0.40, 0.40, +1.0, True, id="not moved, pushed up"),
    pytest.param(0.40, 0.40, -1.0, True, id="not moved, pushed down"),
]


@pytest.mark.parametrize(("policy", "behavior", "advantage", "keep"), TABLE)
@pytest.mark.parametrize("divergence", [regions.BinaryTV(), regions.BinaryKL()], ids=["binary-tv", "binary-kl"])
def test_dppo_stops_only_what_is_outside_and_pushed_further(divergence, policy, behavior, advantage, keep):
    kept, gradient, out = verdict(regions.DPPO(divergence), policy, behavior, advantage)
    assert kept == keep
    assert gradient == pytest.approx(-policy / behavior * advantage if keep else 0.0)
    masked = trustrl.rates(out.sums).get("trustrl/masked_share")
    assert masked is None if advantage == 0 else masked == float(not keep)


@pytest.mark.parametrize(
    ("policy", "behavior", "advantage", "keep"),
    [
        pytest.param(3e-4, 1e-4, +1.0, False, id="a rare token tripled: stopped although the policy hardly moved"),
        pytest.param(0.99, 0.80, +1.0, True, id="a frequent token rose by .19: kept although the policy moved a lot"),
        pytest.param(0.50, 0.40, -1.0, True, id="risen but pulled back"),
        pytest.param(0.30, 0.40, -1.0, False, id="fallen by a quarter and pushed down"),
    ],
)
def test_ppo_looks_at_the_ratio(policy, behavior, advantage, keep):
    assert verdict(regions.PPO(), policy, behavior, advantage)[0] == keep


@pytest.mark.parametrize("advantage", [+1.0, -1.0])
@pytest.mark.parametrize(("policy", "keep"), [(0.75, False), (0.65, True), (0.05, False), (0.15, True)])
def test_a_symmetric_mask_ignores_the_advantage(policy, keep, advantage):
    assert verdict(regions.IPO(), policy, 0.4, advantage)[0] == keep


@pytest.mark.parametrize("region", ["ipo", "kpop", "trm-sampled"])
def test_a_zero_advantage_is_kept_by_symmetric_regions_too(region):
    kept, _, out = verdict(trustrl.preset(region), 0.999, 0.01, 0.0)
    assert kept
    assert float(out.sums.added["masked"]) == 0


def test_a_token_exactly_at_the_bound_is_inside():
    """Strict comparison, on a gap that float64 represents."""
    region = regions.DPPO(regions.BinaryTV(max_increase=0.25))
    logp = torch.tensor([0.75, 0.5], dtype=torch.float64).log()
    gap = float(logp[0].exp() - logp[1].exp())
    at = regions.DPPO(regions.BinaryTV(max_increase=gap))
    below = regions.DPPO(regions.BinaryTV(max_increase=math.nextafter(gap, 0)))
    assert verdict(at, 0.75, 0.5, 1.0)[0]
    assert not verdict(below, 0.75, 0.5, 1.0)[0]
    assert region.divergence.bounds == (0.25, 0.25)


@pytest.mark.parametrize(("side", "policy", "advantage"), [("max_increase", 0.95, 1.0), ("max_decrease", 0.05, -1.0)])
def test_infinity_switches_one_side_off(side, policy, advantage):
    one_sided = regions.DPPO(regions.BinaryTV(**{"max_increase": 0.1, "max_decrease": 0.1, side: math.inf}))
    assert verdict(one_sided, policy, 0.5, advantage)[0]
    assert not verdict(regions.DPPO(regions.BinaryTV(max_increase=0.1)), policy, 0.5, advantage)[0]


def test_bounds_belong_to_their_side():
    region = regions.DPPO(regions.BinaryTV(max_increase=0.4, max_decrease=0.1))
    assert verdict(region, 0.8, 0.5, 1.0)[0]
    assert not verdict(region, 0.2, 0.5, -1.0)[0]


def test_acting_on_the_upper_end_stops_what_the_lower_end_cannot_see():
    """|b − π| = .02, but up to .9 of the mass may have moved elsewhere."""
    lower, upper = (regions.DPPO(regions.BinaryTV(act_on=end)) for end in ("lower", "upper"))
    assert verdict(lower, 0.12, 0.10, 1.0)[0]
    assert not verdict(upper, 0.12, 0.10, 1.0)[0]


def test_undecided_tokens_keep_their_gradient():
    """The bound .15 lies between |b − π| = .02 and the upper end .9."""
    _, gradient, out = verdict(regions.DPPO(), 0.12, 0.10, 1.0)
    lower, upper = (float(end) for end in out.decision.divergence)
    assert lower < 0.15 < upper
    assert gradient == pytest.approx(-1.2)


@pytest.mark.parametrize(
    ("correction", "k", "factor"),
    [
        pytest.param(regions.TIS(), 1.5, 1.5, id="tis below the cap"),
        pytest.param(regions.TIS(), 4.0, 2.0, id="tis above the cap"),
        pytest.param(regions.IcePop(), 0.4, 0.0, id="icepop below its band"),
        pytest.param(regions.IcePop(), 0.6, 0.6, id="icepop inside its band"),
        pytest.param(regions.IcePop(), 6.0, 0.0, id="icepop above its band"),
        pytest.param(regions.MIS(min_ratio=0.5, max_ratio=2.0, level="token"), 2.5, 0.0, id="mis above its band"),
        pytest.param(
            regions.MIS(min_ratio=0.5, max_ratio=2.0, level="sequence-mean"), 1.9, 1.9, id="mis inside its band"
        ),
    ],
)
def test_corrections_multiply_the_weight(correction, k, factor):
    region = regions.PPO(anchor="proximal", correction=correction)
    _, gradient, _ = verdict(region, 0.1, 0.1 / k, 1.0, proximal=0.1)
    assert gradient == pytest.approx(-factor)


def test_sequence_level_mis_uses_the_geometric_mean():
    """k = 4 and k = 1/4 cancel: the sequence is inside, its tokens are not."""
    logp = torch.tensor([[log(0.2), log(0.2)]], dtype=torch.float64, requires_grad=True)
    rollout = trustrl.RolloutTokens(
        behavior_logp=torch.tensor([[log(0.05), log(0.8)]], dtype=torch.float64), proximal_logp=logp.detach(),
        advantage=torch.ones(1), in_loss=torch.ones(1, 2, dtype=torch.bool),
    )  # fmt: skip
    for level, want in (("token", 0.0), ("sequence-mean", -1.0), ("sequence-product", -1.0)):
        logp.grad = None
        region = regions.PPO(anchor="proximal", correction=regions.MIS(min_ratio=0.5, max_ratio=2.0, level=level))
        trustrl.policy_loss(
            trustrl.PolicyTokens(logp=logp), rollout, region, reduction=trustrl.TokenSum()
        ).loss.backward()
        torch.testing.assert_close(logp.grad, torch.full((1, 2), want, dtype=torch.float64))


def two_tokens(region, policy, behavior, advantage):
    logp = torch.tensor([[log(p) for p in policy]], dtype=torch.float64, requires_grad=True)
    rollout = trustrl.RolloutTokens(
        behavior_logp=torch.tensor([[log(b) for b in behavior]], dtype=torch.float64),
        advantage=torch.tensor([advantage], dtype=torch.float64), in_loss=torch.ones(1, len(policy), dtype=torch.bool),
    )  # fmt: skip
    out = trustrl.policy_loss(trustrl.PolicyTokens(logp=logp), rollout, region, reduction=trustrl.TokenSum())
    return out.decision.keep[0].tolist()


def test_sequence_level_takes_one_verdict_from_the_mean():
    """D = .4 and .0: the mean .2 is outside, the sequence as a whole rose."""
    mean = regions.TrustRegion(regions.BinaryTV(max_increase=0.15), level="sequence")
    assert two_tokens(mean, (0.9, 0.5), (0.5, 0.5), 1.0) == [False, False]
    assert two_tokens(mean, (0.9, 0.5), (0.5, 0.5), -1.0) == [True, True]
    assert two_tokens(mean, (0.7, 0.5), (0.5, 0.5), 1.0) == [True, True]
    worst = regions.TrustRegion(regions.BinaryTV(max_increase=0.15), level="sequence-max")
    assert two_tokens(worst, (0.7, 0.5), (0.5, 0.5), 1.0) == [False, False]


def test_trm_drops_the_whole_sequence_without_a_sign_test():
    region = regions.TRM(regions.BinaryKL(max_increase=0.05))
    assert two_tokens(region, (0.9, 0.5), (0.5, 0.5), -1.0) == [False, False]
    assert two_tokens(region, (0.55, 0.5), (0.5, 0.5), -1.0) == [True, True]
    # log r cancels to a mean of 0: there is no side, and the sequence goes all the same.
    assert two_tokens(trustrl.preset("trm-sampled"), (0.5, 0.25), (0.25, 0.5), 1.0) == [False, False]


def test_trm_can_also_look_at_the_mean():
    by_max = regions.TRM(regions.SampledK2(max_increase=1.0))
    by_mean = regions.TRM(regions.SampledK2(max_increase=1.0), mean=regions.SampledK3(max_increase=0.001))
    assert two_tokens(by_max, (0.6, 0.5), (0.5, 0.5), 1.0) == [True, True]
    assert two_tokens(by_mean, (0.6, 0.5), (0.5, 0.5), 1.0) == [False, False]


def test_cppo_spends_a_budget():
    """Each token alone is inside .15; what the first ones spend the last one lacks."""
    budget = regions.PrefixBudget(rate=0.015, last_weight=0.8)
    region = regions.CPPO(regions.BinaryTV(max_increase=0.15), budget=budget)
    assert two_tokens(region, (0.62, 0.62, 0.62), (0.5, 0.5, 0.5), 1.0) == [True, False, False]
    assert two_tokens(region, (0.62, 0.5, 0.5), (0.5, 0.5, 0.5), 1.0) == [True, True, True]
    assert two_tokens(region, (0.62, 0.62, 0.62), (0.5, 0.5, 0.5), -1.0) == [True, True, True]
    token_level = regions.DPPO(regions.BinaryTV(max_increase=0.15))
    assert two_tokens(token_level, (0.62, 0.62, 0.62), (0.5, 0.5, 0.5), 1.0) == [True, True, True]


def test_the_top_k_set_is_a_union_with_the_sampled_token():
    """The sampled token outside the top K is a cell beside all K of them; it replaces none."""
    b = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    p = torch.tensor([0.5, 0.1, 0.15, 0.25], dtype=torch.float64)
    rollout = trustrl.RolloutTokens(
        behavior_logp=b[[3]].log(), advantage=torch.ones(1), in_loss=torch.tensor([True]), token_ids=torch.tensor([3]),
        topk=trustrl.TopK(torch.tensor([[0, 1]]), b[:2].log().view(1, 2)),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=p[[3]].log(), topk_logp=p[:2].log().view(1, 2))
    region = regions.DPPO(regions.TopKTV(k=2))
    out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum())
    # cells {0}, {1}, {3}, rest: ½(0 + .2 + .2 + 0) = .2; replacing id 1 by the sampled one would see ½(.2 + .2) as well,
    # but with the tail .45 → .25 merged away it could not tell id 1 from id 2.
    assert float(out.decision.divergence.lower) == pytest.approx(0.2)
    assert float(out.decision.divergence.upper) == pytest.approx(0.2 + 0.15)

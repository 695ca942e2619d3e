"""The edges of each building block: ties, ends, dtypes, and the path that other devices take."""

import math
from unittest.mock import Mock

import pytest
import torch

import trustrl
import trustrl.core.decision
import trustrl.core.projection
from support.troll_corpus import CORPUS, sparse_loss
from support.worlds import tokens_of_sequences, world
from trustrl import regions
from trustrl.core import divergences
from trustrl.core.clean import clean_tokens
from trustrl.core.losses import penalty_terms, policy_terms
from trustrl.core.numerics import free_to_look, verdict_dtype
from trustrl.core.ops import pushed_outward
from trustrl.core.partition import Partition
from trustrl.core.projection import troll_project
from trustrl.regions.cppo import overspent
from trustrl.regions.dppo import leaving
from trustrl.regions.ipo import outside
from trustrl.regions.ppo import runaway
from trustrl.regions.sapo import soft_gate


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_leaving_at_its_edges():
    d = t(0.2, 0.2, 0.2, 0.2, 0.1, 0.1, 0.3, 0.3)
    log_ratio = t(0.0, 0.0, 1e-9, -1e-9, 1.0, -1.0, 1.0, -1.0)
    advantage = t(1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.0, 0.0)
    stop = leaving(d, log_ratio, advantage, max_increase=0.1, max_decrease=0.1)
    # r = 1 is on no side; any r beyond it is; the bound itself is inside; A = 0 has nothing to stop.
    assert stop.tolist() == [False, False, True, True, False, False, False, False]


def test_outside_at_its_edges():
    d = t(0.2, 0.2, 0.2, 0.1, 0.3, 0.4, 0.31)
    log_ratio = t(0.5, -0.5, 0.0, 0.5, -0.5, 0.0, 0.0)
    stop = outside(d, log_ratio, max_increase=0.1, max_decrease=0.3)
    # above: max_increase; below: max_decrease; neither: the looser of the two; at the bound: inside.
    assert stop.tolist() == [True, False, False, False, False, True, True]
    assert outside(t(0.2, 0.31), t(0.0, 0.0), max_increase=0.3, max_decrease=0.1).tolist() == [False, True]


def test_the_prefix_budget_weighs_by_position():
    """The last of two tokens weighs .8: a distance of .18 costs .144 and fits into .15; the first's .16 does not."""
    two = tokens_of_sequences(0, 0)
    ones = t(1.0, 1.0)

    def stop(d, advantage=ones):
        return overspent(two, t(*d), pushed_outward(ones, advantage), bound=0.15, rate=1.0, last_weight=0.8).tolist()

    assert stop((0.0, 0.18)) == [False, False]
    assert stop((0.0, 0.19)) == [False, True]
    assert stop((0.16, 0.0)) == [True, False]
    assert stop((0.16, 0.5), advantage=t(0.0, 0.0)) == [False, False]
    neither = pushed_outward(t(0.0, 0.0), t(1.0, -1.0))
    still = overspent(two, t(0.5, 0.5), neither, bound=0.15, rate=1.0, last_weight=0.8)
    assert still.tolist() == [False, False]  # r = 1 is on no side
    assert stop((0.15, 0.0)) == [False, False]  # what just fits is spent
    second = pushed_outward(-ones, t(0.0, -1.0))
    falling = overspent(two, t(0.5, 0.5), second, bound=0.15, rate=1.0, last_weight=0.8)
    assert falling.tolist() == [False, True]


def test_the_soft_gate_takes_the_negative_temperature_at_zero():
    weight, value = soft_gate(t(0.5), t(0.0), temperature_positive=1.0, temperature_negative=2.0)
    negative, _ = soft_gate(t(0.5), t(-1.0), temperature_positive=1.0, temperature_negative=2.0)
    assert weight == negative
    assert value == 0


@pytest.mark.parametrize("region", [regions.SPO(), regions.DRPO()], ids=["spo", "drpo"])
def test_an_endless_ratio_without_advantage_has_a_weight(region):
    rollout = trustrl.RolloutTokens(
        behavior_logp=t(-800.0, -1.0), advantage=t(0.0, 1.0), in_loss=torch.ones(2, dtype=torch.bool)
    )
    out = trustrl.policy_loss(trustrl.PolicyTokens(logp=t(-0.1, -1.0)), rollout, region, reduction=trustrl.TokenSum())
    assert not out.decision.weight.isnan().any()


ROUNDED = {
    "dppo": lambda: trustrl.preset("dppo-binary-kl"),
    "kpop": lambda: trustrl.preset("kpop"),
    "trm": lambda: regions.TRM(regions.BinaryKL()),
    "cppo": lambda: regions.CPPO(regions.BinaryKL()),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_certainty_that_float32_rounds_to_1_has_not_moved_infinitely_far(name):
    """In float32 1 − 5e-8 is 1. Token by token both sides are within rounding of each other; the last one did move."""
    nearly = torch.tensor([[-1.2e-7, -1.9e-6, 0.0, 0.0, -1e-7, math.log(0.5)]])
    policy = torch.tensor([[0.0, 0.0, -1.2e-7, 0.0, -1e-7, 0.0]])
    on = torch.ones(1, 6, dtype=torch.bool)

    def kept(upto):
        rollout = trustrl.RolloutTokens(
            behavior_logp=nearly, advantage=torch.ones(1), in_loss=on & (torch.arange(6) < upto)
        )
        out = trustrl.policy_loss(
            trustrl.PolicyTokens(logp=policy), rollout, ROUNDED[name](), reduction=trustrl.TokenSum()
        )
        return out.decision

    still = kept(5)
    assert still.keep.all()
    assert still.divergence.lower.max() < 1e-5
    assert not kept(6).keep[0, -1]


def test_certainty_closes_the_kl_interval():
    certain = divergences.binary_kl(t(math.log(0.5)), t(0.0))
    assert certain.upper == certain.lower == pytest.approx(math.log(2))
    doubtful = divergences.binary_kl(t(math.log(0.5)), t(math.log(0.9)))
    assert doubtful.upper == math.inf


def test_rounding_above_certainty_is_certainty():
    """+1e-4 in a log-prob is rounding; no probability exceeds 1, and no TV does."""
    just_above = t(1e-4)
    assert divergences.binary_tv(just_above, t(0.0)).lower == 0
    assert divergences.binary_tv(just_above, t(-800.0)).lower == 1
    assert divergences.binary_kl(just_above, t(0.0)).lower == 0
    heavy = t(0.7, 0.7).log().unsqueeze(0)
    light = t(1e-9, 1e-9).log().unsqueeze(0)
    cells = Partition(heavy, light, heavy.exp(), light.exp(), t(0.0), t(1.0), None, 0.0)
    interval = divergences.topk_tv(cells, t(-30.0), t(math.log(0.6)))
    assert interval.lower == interval.upper == 1
    over = torch.log(t(0.8, 0.8, 0.4)), torch.log(t(1e-9, 1e-9, 1.0))
    assert divergences.full_tv(*over).lower == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_verdicts_are_float64_and_terms_are_float32(dtype):
    w = world(0, rows=2, width=3)
    rollout = w.rollout(dtype=dtype)
    policy = w.policy_tokens(rollout, dtype=dtype)
    for interval in (
        divergences.full_tv(policy.full_logp, rollout.full.logp),
        divergences.full_kl(policy.full_logp, rollout.full.logp),
        divergences.binary_tv(policy.logp, rollout.behavior_logp),
        divergences.binary_kl(policy.logp, rollout.behavior_logp),
        divergences.ratio_gap(policy.logp, rollout.behavior_logp),
    ):
        assert interval.lower.dtype == torch.float64
    for region in (regions.DPPO(), regions.SPO()):
        tokens = clean_tokens(policy, rollout, region.needs())
        decision = trustrl.core.decision.decide(tokens, region)
        assert policy_terms(decision, tokens).value.dtype == torch.float32
        bonus = penalty_terms(trustrl.EntropyBonus(coefficient=1.0), policy, rollout, tokens, decision.keep)
        assert bonus.value.dtype == torch.float32


@pytest.mark.parametrize("region", ["pg-is", "spo", "drpo", "sapo"])
def test_a_zero_advantage_at_an_infinite_ratio_is_no_fault(region):
    """inf · 0 is NaN, and there is nothing to lose."""
    logp = t(-1.0).requires_grad_()
    rollout = trustrl.RolloutTokens(behavior_logp=t(-1e6), advantage=t(0.0), in_loss=torch.tensor([True]))
    out = trustrl.policy_loss(
        trustrl.PolicyTokens(logp=logp), rollout, trustrl.preset(region), reduction=trustrl.TokenSum()
    )
    out.loss.backward()
    assert float(out.sums.added["fault/overflow"]) == 0
    assert out.loss == 0
    assert logp.grad == 0


@pytest.mark.parametrize("size", [1.0, -1.0])
def test_the_largest_term_is_kept_and_the_next_is_not(size):
    """finfo.max · 1e-7: a sum of ten million of them still fits."""
    limit = torch.finfo(torch.float64).max * 1e-7
    for factor, kept in ((1.0, True), (1.0 + 1e-12, False)):
        logp = t(-0.5).requires_grad_()
        rollout = trustrl.RolloutTokens(
            behavior_logp=t(-0.5), advantage=t(size * limit * factor), in_loss=torch.tensor([True])
        )
        out = trustrl.policy_loss(
            trustrl.PolicyTokens(logp=logp), rollout, regions.PolicyGradient(), reduction=trustrl.TokenSum()
        )
        out.loss.backward()
        assert (float(logp.grad) != 0) == kept
        assert float(out.sums.added["fault/overflow"]) == float(not kept)


@pytest.mark.parametrize("bound", [1e-6, 1e-5])
def test_a_tiny_ball_is_met_as_exactly_as_a_large_one(bound):
    p, b = CORPUS["random, large steps"]()
    found = troll_project(p[:2000], b[:2000], bound=bound)
    assert found.active.all()
    assert found.converged.all()
    torch.testing.assert_close(found.kl_after, torch.full_like(found.kl_after, bound), rtol=1e-4, atol=0)


def test_evaluations_are_counted_where_there_is_something_to_find():
    p, b = CORPUS["random, small steps"]()
    found = troll_project(p, b, bound=0.05)
    assert 0 < found.active.double().mean() < 1
    assert (found.evaluations[found.active] >= 1).all()
    assert (found.evaluations[~found.active] == 0).all()
    assert (found.evaluations == found.evaluations.round()).all()
    assert found.evaluations.dtype == torch.float64


def test_a_backend_without_float64_gets_float32():
    """No such backend is here: only the choice is checked, on a stand-in for its tensor."""
    stand_in = Mock(spec=torch.Tensor, device=Mock(type="mps"))
    assert verdict_dtype(stand_in) == torch.float32
    assert verdict_dtype(torch.zeros(1)) == torch.float64


def test_what_the_projection_reports_carries_no_gradient():
    p = torch.log_softmax(torch.randn(4, 5, dtype=torch.float64), -1).requires_grad_()
    found = troll_project(p, torch.full((4, 5), -math.log(5), dtype=torch.float64), bound=0.05)
    assert found.log_projected.requires_grad
    for name in ("beta", "kl_before", "kl_after", "evaluations", "converged", "active"):
        assert not getattr(found, name).requires_grad, name


@pytest.mark.parametrize("name", ["random, large steps", "one-hot swap, 100 nats", "at the edge", "not moved"])
def test_the_path_without_looking_gives_the_same_projection(name, monkeypatch):
    """On an accelerator no value is read back: every row is iterated a fixed number of times. Run here on CPU."""
    p, b = CORPUS[name]()
    p, b = p[:500], b[:500]
    want = troll_project(p, b, bound=0.05)
    monkeypatch.setattr(trustrl.core.projection, "free_to_look", lambda at: False)
    got = troll_project(p, b, bound=0.05)
    for field in ("log_projected", "beta", "kl_after", "evaluations"):
        torch.testing.assert_close(getattr(got, field), getattr(want, field), rtol=1e-9, atol=1e-12)
    assert torch.equal(got.active, want.active)
    assert got.converged.all()


@pytest.mark.parametrize("fault", [None, torch.nan, torch.inf], ids=["healthy", "NaN", "inf"])
def test_the_path_without_looking_gives_the_same_loss(monkeypatch, fault):
    w = world(5, rows=3, width=5, vocabulary=30, drift=0.35)
    if fault is not None:
        w.advantage[w.in_loss.nonzero()[0].tolist()[0], w.in_loss.nonzero()[0].tolist()[1]] = fault
    grads = []
    for looking in (True, False):
        monkeypatch.setattr(trustrl.core.projection, "free_to_look", lambda at, looking=looking: looking)
        monkeypatch.setattr(trustrl.core.projection, "free_to_look", lambda at, looking=looking: looking)
        logits = w.policy.clone().requires_grad_()
        out = sparse_loss(regions.TROLL(k=6, anchor="behavior"), w, logits, 6)
        out.loss.backward()
        grads.append((out.loss.item(), logits.grad, trustrl.rates(out.sums)))
    assert torch.isfinite(grads[1][1]).all()
    assert grads[0][2]["trustrl/dropped_share"] == pytest.approx(0 if fault is None else 1 / w.num_tokens)
    assert grads[0][0] == pytest.approx(grads[1][0], rel=1e-12)
    torch.testing.assert_close(grads[0][1], grads[1][1], rtol=0, atol=1e-12)
    assert grads[0][2] == pytest.approx(grads[1][2], rel=1e-9)


def test_only_a_cpu_lets_work_depend_on_values():
    assert free_to_look(torch.zeros(1))
    assert not free_to_look(torch.zeros(1, device="meta"))


def test_dual_clip_keeps_a_ratio_at_its_bound():
    assert runaway(t(math.log(2.0)), t(-1.0), max_ratio=2.0).tolist() == [False]
    assert runaway(t(math.log(2.0) + 1e-9), t(-1.0), max_ratio=2.0).tolist() == [True]
    assert runaway(t(5.0), t(0.0), max_ratio=2.0).tolist() == [False]


def mismatched(correction, *log_k):
    """Tokens that stand still, each with its own mismatch."""
    behavior = torch.full((1, len(log_k)), -3.0, dtype=torch.float64)
    proximal = behavior + torch.tensor([log_k], dtype=torch.float64)
    logp = proximal.clone().requires_grad_()
    rollout = trustrl.RolloutTokens(
        behavior_logp=behavior, proximal_logp=proximal, advantage=torch.ones(1), in_loss=torch.ones(1, len(log_k)).bool()
    )  # fmt: skip
    region = regions.PPO(anchor="proximal", correction=correction)
    out = trustrl.policy_loss(trustrl.PolicyTokens(logp=logp), rollout, region, reduction=trustrl.TokenSum())
    out.loss.backward()
    return (-logp.grad[0]).tolist(), trustrl.rates(out.sums)


def test_a_band_includes_its_ends_and_reports_what_it_dropped():
    edge = math.exp(0.5)
    factors, rates = mismatched(
        regions.IcePop(min_ratio=math.exp(-0.5), max_ratio=edge), 0.5, -0.5, 0.5 + 1e-9, -0.5 - 1e-9, 0.0
    )
    assert factors == pytest.approx([edge, math.exp(-0.5), 0.0, 0.0, 1.0])
    assert rates["trustrl/correction_zero_share"] == pytest.approx(0.4)
    assert rates["trustrl/correction_mean"] == pytest.approx((edge + math.exp(-0.5) + 1) / 5)


def test_a_penalty_that_overflows_takes_its_token_out():
    """IPO's τ log² r is part of the region's term: not finite, and the token is left out and counted."""
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    rollout = trustrl.RolloutTokens(
        behavior_logp=torch.tensor([-1.5, -1.0]), advantage=torch.ones(2), in_loss=torch.tensor([True, True])
    )
    region = regions.IPO(log_ratio_penalty=1e36)
    out = trustrl.policy_loss(trustrl.PolicyTokens(logp=logp), rollout, region, reduction=trustrl.TokenSum())
    out.loss.backward()
    assert logp.grad.tolist() == [0.0, -1.0]
    assert float(out.sums.added["fault/overflow"]) == 1


def test_a_reference_in_float64_does_not_widen_the_terms():
    logp = torch.tensor([-1.0])
    rollout = trustrl.RolloutTokens(
        behavior_logp=logp, advantage=torch.ones(1), in_loss=torch.tensor([True]), reference_logp=t(-1.5)
    )
    policy = trustrl.PolicyTokens(logp=logp)
    tokens = clean_tokens(policy, rollout, regions.DPPO().needs())
    found = penalty_terms(trustrl.KLPenalty(coefficient=1.0), policy, rollout, tokens, tokens.usable)
    assert found.value.dtype == torch.float32


def test_the_weights_of_three_positions():
    """1, .9, .8: a distance of .16 fits at the second place (.144) and not at the first."""
    ones = t(1.0, 1.0, 1.0)
    three = tokens_of_sequences(0, 0, 0)

    def stop(*d):
        return overspent(three, t(*d), ones.bool(), bound=0.15, rate=1.0, last_weight=0.8).tolist()

    assert stop(0.16, 0.0, 0.0) == [True, False, False]
    assert stop(0.0, 0.166, 0.0) == [False, False, False]
    assert stop(0.0, 0.167, 0.0) == [False, True, False]
    assert stop(0.0, 0.0, 0.187) == [False, False, False]
    assert stop(0.0, 0.0, 0.188) == [False, False, True]


def troll_token(size, region, proximal_shift=0.0, advantage=1.0):
    """One token over three ids, all recorded, moved by `size` along a fixed direction."""
    b = torch.log(t(0.5, 0.3, 0.2))
    p = torch.log_softmax(b + size * t(1.0, -1.0, 0.3), -1)
    logp = p.clone().requires_grad_()
    rollout = trustrl.RolloutTokens(
        behavior_logp=b[:1] - proximal_shift, proximal_logp=b[:1], advantage=t(advantage), in_loss=torch.tensor([True]),
        token_ids=torch.tensor([0]), topk=trustrl.TopK(torch.tensor([[0, 1, 2]]), b.unsqueeze(0), "proximal"),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=logp[:1], topk_logp=logp.unsqueeze(0))
    out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum())
    return trustrl.rates(out.sums), out


def test_a_token_within_the_slack_is_not_counted_as_projected():
    """The ball's edge has a width of 1e-4 ε: rounding must not project what is on it."""
    kl = troll_token(0.3, regions.TROLL(k=3))[0]["trustrl/projected_kl_before"]
    for share, projected in ((1.00005, 0.0), (0.99995, 0.0), (0.9998, 1.0)):
        rates, _ = troll_token(0.3, regions.TROLL(kl * share, k=3))
        assert rates["trustrl/projected_share"] == projected, share


def test_what_troll_reports():
    rates, out = troll_token(1.0, regions.TROLL(k=3))
    assert rates["trustrl/projected_share"] == 1.0
    assert rates["trustrl/projected_kl_after"] == pytest.approx(0.05, rel=1e-6)
    assert rates["trustrl/projected_kl_before"] > 0.05
    assert 0 < rates["trustrl/projected_beta"] < 1
    assert 1 <= rates["trustrl/projected_evaluations"] <= 8
    assert rates["trustrl/projected_unconverged"] == 0
    inside, _ = troll_token(0.01, regions.TROLL(k=3))
    assert inside["trustrl/projected_share"] == 0.0
    assert inside["trustrl/projected_kl_after"] == inside["trustrl/projected_kl_before"] > 0


def test_trolls_correction_scales_the_first_term():
    """k = e^.4: the loss is −k·π̂/b plus the pull."""
    plain = troll_token(1.0, regions.TROLL(k=3, alpha=0.0), proximal_shift=0.4)[1].loss.item()
    corrected = troll_token(
        1.0, regions.TROLL(k=3, alpha=0.0, correction=regions.TIS(max_ratio=10.0)), proximal_shift=0.4
    )[1]
    assert corrected.loss.item() == pytest.approx(plain * math.exp(0.4))

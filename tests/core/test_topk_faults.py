"""Top-K records that no distribution could have produced: dropped and counted by the loss, raised by `check`."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

import trustrl
from support.worlds import mapped, world
from trustrl.core.partition import is_coarse, largest_mass

REGIONS = ("dppo-topk-tv", "dppo-topk-kl", "troll")


def batch(name, *, dtype=torch.float32, seed=1, sampled_in_topk=True):
    """Records for a Top-K region, with the sampled token among the columns unless told otherwise."""
    region = trustrl.preset(name)
    needs = region.needs()
    w = world(seed, rows=4, width=8, vocabulary=200, drift=0.05)
    source = w.anchor(needs.anchor)
    ids = source.topk(needs.topk, -1).indices
    if sampled_in_topk:
        missing = (ids != w.tokens.unsqueeze(-1)).all(-1)
        ids[..., -1] = torch.where(missing, w.tokens, ids[..., -1])
    rollout = trustrl.RolloutTokens(
        behavior_logp=w.at_token(w.behavior).to(dtype), proximal_logp=w.at_token(w.proximal).to(dtype),
        advantage=w.advantage.to(dtype), in_loss=w.in_loss, token_ids=w.tokens,
        topk=trustrl.TopK(ids, source.gather(-1, ids).to(dtype), of=needs.anchor),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=w.at_token(w.policy).to(dtype), topk_logp=w.policy.gather(-1, ids).to(dtype))
    return region, policy, rollout, w


def measured(region, policy, rollout):
    leaf = policy.logp.detach().clone().requires_grad_()
    out = trustrl.policy_loss(replace(policy, logp=leaf), rollout, region, reduction=trustrl.TokenSum())
    out.loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", trustrl.errors.TrustRLWarning)
        return trustrl.rates(out.sums), leaf.grad


def assert_all_dropped(region, policy, rollout, fault):
    found, grad = measured(region, policy, rollout)
    assert found[f"trustrl/fault_{fault}"] == int(rollout.in_loss.sum())
    assert found["trustrl/dropped_share"] == 1
    assert not grad.any()


@pytest.mark.parametrize("name", REGIONS)
def test_policy_columns_that_sum_to_20_are_dropped_and_raised(name):
    region, policy, rollout, w = batch(name)
    others = rollout.topk.ids != w.tokens.unsqueeze(-1)
    wrong = replace(policy, topk_logp=torch.where(others, -1e-3, policy.topk_logp))
    assert_all_dropped(region, wrong, rollout, "mass")
    with pytest.raises(trustrl.errors.RecordError, match=r"topk_logp must sum to at most 1 .* got \d+ tokens"):
        trustrl.check(wrong, rollout)


@pytest.mark.parametrize("name", REGIONS)
def test_anchor_columns_that_sum_to_20_are_dropped_and_raised(name):
    region, policy, rollout, w = batch(name)
    others = rollout.topk.ids != w.tokens.unsqueeze(-1)
    topk = replace(rollout.topk, logp=torch.where(others, -1e-3, rollout.topk.logp))
    assert_all_dropped(region, policy, replace(rollout, topk=topk), "mass")
    with pytest.raises(trustrl.errors.RecordError, match="must sum to at most 1"):
        trustrl.check(policy, replace(rollout, topk=topk))


@pytest.mark.parametrize("name", REGIONS)
def test_policy_columns_at_another_temperature_are_dropped_and_raised(name):
    region, policy, rollout, w = batch(name)
    cooler = torch.log_softmax(w.policy / 0.7, -1).gather(-1, rollout.topk.ids).float()
    wrong = replace(policy, topk_logp=cooler)
    at_token = torch.log_softmax(w.policy / 0.7, -1).gather(-1, w.tokens.unsqueeze(-1)).squeeze(-1)
    differs = ((at_token - policy.logp).abs() > 2e-3) & w.in_loss  # the two may cross at single tokens
    assert differs.sum() > 0.9 * w.in_loss.sum()
    found, grad = measured(region, wrong, rollout)
    assert found["trustrl/fault_column"] >= differs.sum()
    assert not grad[differs].any()
    with pytest.raises(trustrl.errors.RecordError, match=r"must equal PolicyTokens.logp at the sampled id|must sum"):
        trustrl.check(wrong, rollout)


@pytest.mark.parametrize("name", REGIONS)
def test_policy_columns_shifted_by_one_are_dropped_and_raised(name):
    region, policy, rollout, w = batch(name)
    wrong = replace(policy, topk_logp=policy.topk_logp.roll(1, -1))
    found, _ = measured(region, wrong, rollout)
    assert found["trustrl/dropped_share"] > 0.9  # neighbors may be equal at single tokens
    with pytest.raises(trustrl.errors.RecordError, match=r"must equal PolicyTokens.logp|must sum to at most 1"):
        trustrl.check(wrong, rollout)


def test_a_vocabulary_that_sums_to_more_than_1_is_dropped_and_raised():
    w = world(3)
    region = trustrl.preset("dppo-full-tv")
    rollout = w.rollout()
    policy = trustrl.PolicyTokens(logp=w.at_token(w.policy) + 0.1, full_logp=w.policy + 0.1)
    policy = replace(policy, logp=policy.logp.clamp(max=0), full_logp=policy.full_logp.clamp(max=0))
    found, _ = measured(region, policy, rollout)
    assert found["trustrl/fault_mass"] > 0
    with pytest.raises(trustrl.errors.RecordError, match="full_logp must sum to at most 1"):
        trustrl.check(policy, replace(rollout, topk=None))


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sampled_in_topk", [True, False], ids=["sampled among the ids", "sampled anywhere"])
def test_honest_records_pass_in_every_dtype(name, dtype, sampled_in_topk):
    """Every number is rounded to the dtype from float64 truth, on its own."""
    for seed in range(5):
        region, policy, rollout, w = batch(name, dtype=dtype, seed=seed, sampled_in_topk=sampled_in_topk)
        found, _ = measured(region, policy, rollout)
        assert found["trustrl/dropped_share"] == 0
        trustrl.check(policy, rollout, region)


@pytest.mark.parametrize("name", [*REGIONS, "dppo-full-tv", "dppo-full-kl"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_honest_records_pass_when_a_wider_dtype_carries_them(name, dtype):
    """A trainer that computes in bf16 and hands over float32: only the numbers show it."""
    needs = trustrl.preset(name).needs()
    for seed in range(5):
        w = world(seed, rows=8, width=16, vocabulary=200, drift=0.3, peak=3.0)
        rollout = w.rollout(needs.anchor, dtype=dtype, k=needs.topk or 20)
        policy = w.policy_tokens(rollout, dtype=dtype)
        policy, rollout = (mapped(x, lambda t: t.float() if t.is_floating_point() else t) for x in (policy, rollout))
        found, _ = measured(trustrl.preset(name), policy, rollout)
        assert found["trustrl/dropped_share"] == 0


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(2, 300), peak=st.floats(0.0, 8.0), seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)  # fmt: skip
def test_the_bound_on_mass_holds_for_any_distribution_rounded_to_its_dtype(n, peak, seed, dtype):
    g = torch.Generator().manual_seed(seed)
    logp = torch.log_softmax(peak * torch.randn(n, generator=g, dtype=torch.float64), -1).to(dtype)
    roundoff = 2.0**-24 if dtype == torch.float32 else 2.0**-8
    assert logp.double().exp().sum() <= largest_mass(n, roundoff)


def test_equal_probabilities_nearly_reach_the_bound_on_mass():
    """The derivation's worst case: without it the bound could be far too wide and still hold."""
    worst = 0.0
    for n in range(2, 3000):
        logp = torch.full((n,), -math.log(n), dtype=torch.float64).to(torch.bfloat16)
        worst = max(
            worst, (logp.double().exp().sum().log() - 1e-3).item() / (math.log(largest_mass(n, 2.0**-8)) - 1e-3)
        )
    assert 0.7 < worst <= 1.0


def test_troll_on_records_narrower_than_its_k_is_loud():
    """20 recorded columns, k = 64: every token is dropped."""
    w = world(1, rows=4, width=8, vocabulary=200, drift=0.05)
    ids = w.proximal.topk(20, -1).indices
    rollout = trustrl.RolloutTokens(
        proximal_logp=w.at_token(w.proximal), advantage=w.advantage, in_loss=w.in_loss, token_ids=w.tokens,
        topk=trustrl.TopK(ids, w.proximal.gather(-1, ids), of="proximal"),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=w.at_token(w.policy), topk_logp=w.policy.gather(-1, ids))
    region = trustrl.preset("troll")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the loss itself only counts
        out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum())
        sums = out.sums
    with pytest.warns(trustrl.errors.TrustRLWarning, match="dropped most of its tokens: fewer than k ids are recorded"):
        found = trustrl.rates(sums)
    assert found["trustrl/fault_narrow"] == w.in_loss.sum()
    with pytest.raises(
        trustrl.errors.RecordError, match=r"troll must keep most tokens .* would drop 100%: fewer than k ids"
    ):
        trustrl.check(policy, rollout, region)
    trustrl.check(policy, rollout)  # without the region there is nothing wrong with them


def test_rounded_numbers_are_told_from_float32_ones_by_their_bits():
    g = torch.Generator().manual_seed(0)
    logp = -10 * torch.rand(100_000, generator=g, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        assert is_coarse(logp.to(dtype)).all()
        assert is_coarse(logp.to(dtype).double()).all()
    assert is_coarse(logp.float()).double().mean() < 3e-4  # 1 in 8,192
    assert is_coarse(torch.tensor([-torch.inf, 0.0])).all()

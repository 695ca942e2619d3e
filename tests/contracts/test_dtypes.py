"""bf16, fp16 and fp32 inputs: the verdict is the one exact arithmetic gives on the same rounded numbers."""

import pytest
import torch

import trustrl
from support.worlds import K, mapped, narrow_preset, world

PRESETS = trustrl.presets()
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def both(name, dtype, seed, drift):
    """One batch rounded to `dtype`, then judged in that dtype and in float64."""
    region = narrow_preset(name)
    needs = region.needs()
    w = world(seed, rows=16, width=32, vocabulary=70, drift=drift, peak=3.0)
    # TROLL and the KL over a top K floor a tail that they have to derive at the resolution of the record's dtype, which
    # a float64 copy of bf16 numbers no longer shows; with tails given, both sides are the same numbers.
    floors = region.kind == "troll" or name in ("dppo-topk-kl", "dppo-topk-kl-scaling", "trm")
    rollout = w.rollout(needs.anchor, dtype=dtype, k=needs.topk or K, with_tails=floors)
    policy = w.policy_tokens(rollout, dtype=dtype)
    exact = [mapped(x, lambda t: t.double() if t.is_floating_point() else t) for x in (policy, rollout)]
    reduction = (
        trustrl.SequenceMeanTokenMean(num_sequences=16)
        if region.needs().reduction
        else trustrl.TokenMean(num_tokens=400)
    )
    outs = [trustrl.policy_loss(p, r, region, reduction=reduction) for p, r in ((policy, rollout), exact)]
    return policy, rollout, outs


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("drift", [0.05, 0.5, 3.0])
def test_no_verdict_differs_from_float64_on_the_same_inputs(name, dtype, drift):
    """Closer to the bound than 1e-5 would be allowed to differ; none does, and none through inf or NaN."""
    policy, rollout, (rounded, exact) = both(name, dtype, 0, drift)
    assert torch.equal(rounded.decision.keep, exact.decision.keep)
    if rounded.decision.divergence is not None:
        for a, b in zip(rounded.decision.divergence, exact.decision.divergence, strict=True):
            assert torch.equal(a.isinf(), b.isinf())
            assert not a.isnan().any()
    torch.testing.assert_close(rounded.decision.weight, exact.decision.weight, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_every_preset_runs_forward_and_backward(name, dtype):
    policy, rollout, (out, exact) = both(name, dtype, 1, 0.05 if name.startswith("trm") else 0.4)
    out.loss.backward()
    assert policy.logp.grad.dtype == dtype
    assert torch.isfinite(policy.logp.grad).all()
    assert policy.logp.grad.abs().sum() > 0 or name.startswith("trm") or name == "flash-reinforce"
    assert out.loss.item() == pytest.approx(exact.loss.item(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_bf16_verdicts_of_dppo_also_match_the_unrounded_formulas(seed):
    """An oracle for the two sampled divergences, written out in float64 from the bf16 numbers."""
    w = world(seed, rows=32, width=32, vocabulary=40, drift=0.5, peak=6.0)
    rollout = w.rollout(dtype=torch.bfloat16)
    policy = w.policy_tokens(rollout, dtype=torch.bfloat16)
    p, b = (x.detach().double().clamp(max=0).exp() for x in (policy.logp, rollout.behavior_logp))
    tv = (b - p).abs()
    rest_p, rest_b = (-torch.expm1(x.detach().double()) for x in (policy.logp, rollout.behavior_logp))
    kl = b * (b / p).log() + torch.where(rest_b > 0, rest_b * (rest_b / rest_p).log(), 0.0)
    advantage = rollout.advantage.double()
    for region, distance, bound in (("dppo-binary-tv", tv, 0.15), ("dppo-binary-kl", kl, 0.05)):
        out = trustrl.policy_loss(policy, rollout, trustrl.preset(region), reduction=trustrl.TokenSum())
        stop = (distance > bound) & (((advantage > 0) & (p > b)) | ((advantage < 0) & (p < b)))
        clear = (distance - bound).abs() > 1e-5
        assert torch.equal((~out.decision.keep)[clear & w.in_loss], stop[clear & w.in_loss])
        assert (stop & w.in_loss).any()


def moved_far(name, advantage):
    """fp16 records of tokens that rose by 3 to 15 nats: above 11, the ratio alone is more than fp16 can hold."""
    region = narrow_preset(name, 20)
    needs = region.needs()
    w = world(2, rows=2, width=8, vocabulary=40, drift=0.1, mismatch=0.0)
    fall = torch.linspace(3.0, 15.0, 16, dtype=torch.float64).reshape(2, 8, 1)
    sampled = torch.zeros_like(w.policy).scatter(-1, w.tokens.unsqueeze(-1), 1.0)
    w.behavior = w.proximal = torch.log_softmax(w.policy - fall * sampled, -1)
    w.policy = torch.log_softmax(w.policy + 2.0 * sampled, -1)
    w.advantage = torch.full_like(w.advantage, advantage)
    w.in_loss[:] = True
    rollout = w.rollout(needs.anchor, dtype=torch.float16, k=needs.topk or K)
    policy = w.policy_tokens(rollout, dtype=torch.float16)
    reduction = trustrl.SequenceMeanTokenMean(num_sequences=1) if needs.reduction else trustrl.TokenSum()
    return trustrl.policy_loss(policy, rollout, region, reduction=reduction), policy


@pytest.mark.parametrize("advantage", [-0.47, 0.47])
@pytest.mark.parametrize("name", PRESETS)
def test_fp16_log_probs_get_finite_gradients_or_the_token_is_counted(name, advantage):
    out, policy = moved_far(name, advantage)
    out.loss.backward()
    for x in (policy.logp, policy.topk_logp, policy.full_logp):
        assert x.grad is None or x.grad.isfinite().all()
    # Whatever has no gradient is masked by the region, too small for fp16, or counted as an overflow.
    lost = out.decision.keep & (out.decision.weight.abs() > 1e-6) & (policy.logp.grad == 0)
    assert lost.sum() <= out.sums.added["fault/overflow"]


def test_an_fp16_gradient_that_would_be_infinite_is_counted():
    out, policy = moved_far("spo", -0.47)
    out.loss.backward()
    assert out.sums.added["fault/overflow"] > 0
    assert (policy.logp.grad == 0).sum() == out.sums.added["fault/overflow"]

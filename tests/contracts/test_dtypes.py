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
    floors = region.kind == "troll" or name in ("dppo-topk-kl", "trm")
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


def test_presets_list_every_published_region():
    """Each row of the specification by name, DPPO in its six divergences."""
    divergences = {f"dppo-{a}-{b}" for a in ("binary", "topk", "full") for b in ("tv", "kl")}
    others = {
        "troll", "ppo", "gspo", "cispo", "sapo", "spo", "drpo", "cppo", "ipo", "kpop", "trm", "tis", "icepop", "mis",
        "minirl", "pg-is", "dppo-decoupled", "dppo-minimal", "troll-gspo", "tis-product", "mis-product", "flash-reinforce",
        "opsm", "gmpo", "vespo", "m2po", "ppo-relaxed", "dis", "divergence-gate", "score-centering",
    }  # fmt: skip
    assert divergences | others <= set(PRESETS)
    assert sorted(PRESETS) == PRESETS


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

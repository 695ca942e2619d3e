"""torch.compile(fullgraph=True) takes every mask and clip region whole, and changes no verdict."""

import pytest
import torch

import trustrl
from support.worlds import K, gradient, world

pytestmark = pytest.mark.compiled


def presets():
    """Returns the presets; of several with one region and one divergence, all but the first as long tests."""
    chosen, seen = [], set()
    for name in trustrl.presets():
        region = trustrl.preset(name)
        code = type(region), type(getattr(region, "divergence", None))
        if not name.startswith("troll"):  # projection solves with a loop of its own
            chosen.append(pytest.param(name, marks=pytest.mark.long if code in seen else ()))
        seen.add(code)
    return chosen


@pytest.mark.parametrize("name", presets())
def test_the_region_compiles_whole(name):
    region = trustrl.preset(name)
    needs = region.needs()
    w = world(4, rows=4, width=8, vocabulary=40, drift=0.06 if name.startswith("trm") else 0.4)
    rollout = w.rollout(needs.anchor, dtype=torch.float32, k=needs.topk or K)
    policy = w.policy_tokens(rollout, dtype=torch.float32)
    reduction = (
        trustrl.SequenceMeanTokenMean(num_sequences=4) if region.needs().reduction else trustrl.TokenMean(num_tokens=24)
    )

    def loss(logp, topk_logp, full_logp):
        current = trustrl.PolicyTokens(logp=logp, topk_logp=topk_logp, full_logp=full_logp)
        out = trustrl.policy_loss(current, rollout, region, reduction=reduction)
        return out.loss, out.decision.keep, out.sums.added

    torch._dynamo.reset()
    # "aot_eager" traces the graph and its backward without generating code: fullgraph is what is asked here.
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, keep, sums = compiled(policy.logp, policy.topk_logp, policy.full_logp)
    got.backward()
    grads = gradient(policy)
    want, want_keep, want_sums = loss(policy.logp, policy.topk_logp, policy.full_logp)
    want.backward()
    torch.testing.assert_close(got, want)
    assert torch.equal(keep, want_keep)
    for a, b in zip(grads, gradient(policy), strict=True):
        torch.testing.assert_close(a, b)
    for key, value in want_sums.items():
        torch.testing.assert_close(sums[key], value)


@pytest.mark.parametrize("name", ["dppo-binary-tv", "dppo-topk-kl", "gspo", "cppo"])
def test_generated_code_gives_the_same_answer(name):
    """The default backend, on one region of each shape: token, support, sequence, prefix."""
    region = trustrl.preset(name)
    needs = region.needs()
    w = world(5, rows=4, width=8, vocabulary=40)
    rollout = w.rollout(needs.anchor, dtype=torch.float32, k=needs.topk or K)
    policy = w.policy_tokens(rollout, dtype=torch.float32)
    reduction = trustrl.SequenceMeanTokenMean(num_sequences=4)

    def loss(logp, topk_logp):
        current = trustrl.PolicyTokens(logp=logp, topk_logp=topk_logp)
        out = trustrl.policy_loss(current, rollout, region, reduction=reduction)
        return out.loss, out.decision.keep

    torch._dynamo.reset()
    got, keep = torch.compile(loss, fullgraph=True)(policy.logp, policy.topk_logp)
    got.backward()
    grads = gradient(policy)
    want, want_keep = loss(policy.logp, policy.topk_logp)
    want.backward()
    torch.testing.assert_close(got, want)
    assert torch.equal(keep, want_keep)
    torch.testing.assert_close(grads[0], gradient(policy)[0])

"""A second derivative of a loss raises: its coefficients are detached, so a Hessian would silently lack their part."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import trustrl
import trustrl.functional as F
from support.worlds import K, narrow_preset, reduction_for, world
from trustrl import regions

MESSAGE = r"must not be differentiated again, got a second derivative.*Call backward\(\) without create_graph=True"


def loss_of(region, w, rollout, logits, impl="eager", **settings):
    logp = torch.log_softmax(logits, -1)
    policy = trustrl.PolicyTokens(
        logp=w.at_token(logp), topk_logp=logp.gather(-1, rollout.topk.ids), full_logp=logp.clone()
    )
    return trustrl.policy_loss(policy, rollout, region, reduction=reduction_for(region, w), impl=impl, **settings).loss


def case(name, dtype=torch.float64):
    w = world(3, rows=3, width=6, vocabulary=40, drift=0.3)
    region = narrow_preset(name, 20)
    rollout = w.rollout(region.needs().anchor, dtype=dtype, k=region.needs().topk or K)
    return w, region, rollout, w.policy.to(dtype).requires_grad_()


@pytest.mark.parametrize("name", trustrl.presets())
def test_the_hessian_of_every_preset_raises_also_next_to_other_terms(name):
    w, region, rollout, logits = case(name)
    total = loss_of(region, w, rollout, logits) + logits.square().sum()
    (gradient,) = torch.autograd.grad(total, logits, create_graph=True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.autograd.grad(gradient.sum(), logits)


@pytest.mark.parametrize("name", ["dppo-binary-tv", "ppo", "spo", "troll"])
def test_backward_and_checkpoints_are_untouched_and_a_graph_that_nobody_uses_is_allowed(name):
    w, region, rollout, logits = case(name)
    (plain,) = torch.autograd.grad(loss_of(region, w, rollout, logits), logits)
    (graphed,) = torch.autograd.grad(loss_of(region, w, rollout, logits), logits, create_graph=True)
    assert torch.equal(plain, graphed)
    for reentrant in (False, True):
        logits.grad = None
        checkpoint(lambda x: loss_of(region, w, rollout, x), logits, use_reentrant=reentrant).backward()
        assert torch.equal(plain, logits.grad)


def test_a_function_transform_differentiates_once_and_not_twice():
    w, region, rollout, logits = case("dppo-binary-tv")
    once = torch.func.grad(lambda x: loss_of(region, w, rollout, x))
    assert torch.equal(once(logits.detach()), torch.autograd.grad(loss_of(region, w, rollout, logits), logits)[0])
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.func.grad(lambda x: once(x).sum())(logits.detach())


def test_penalties_plain_functions_and_projections_raise_too():
    w, region, rollout, logits = case("dppo-binary-tv")
    logp = w.at_token(torch.log_softmax(logits, -1))
    rows = torch.log_softmax(logits, -1).reshape(-1, 40)
    penalized = trustrl.RolloutTokens(
        behavior_logp=rollout.behavior_logp, advantage=rollout.advantage, in_loss=rollout.in_loss,
        reference_logp=rollout.proximal_logp,
    )  # fmt: skip
    losses = {
        "score": trustrl.policy_loss(
            trustrl.PolicyTokens(logp=logp), penalized, regions.CISPO(), reduction=trustrl.TokenSum(),
            penalties=[trustrl.KLPenalty(coefficient=0.1, gradient="score")],
        ).loss,
        "function": F.dppo_loss(logp, rollout.behavior_logp, rollout.advantage, rollout.in_loss).sum(),
        "projection": F.troll_project(rows, w.behavior.reshape(-1, 40), bound=1e-3).log_projected[:, 0].sum(),
    }  # fmt: skip
    for loss in losses.values():
        (gradient,) = torch.autograd.grad(loss + logits.square().sum(), logits, create_graph=True)
        with pytest.raises(RuntimeError, match=MESSAGE):
            torch.autograd.grad(gradient.sum(), logits)


@pytest.mark.compiled
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_loss_compiled_by_its_caller_raises(backend):
    """Log-probs are the graph's inputs here: nothing but the loss would make the compiled backward pass refuse."""
    w, region, rollout, _ = case("dppo-binary-tv", torch.float32)
    logp = w.at_token(w.policy).float().requires_grad_()

    def loss(x):
        return trustrl.policy_loss(trustrl.PolicyTokens(logp=x), rollout, region, reduction=trustrl.TokenSum()).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    (gradient,) = torch.autograd.grad(compiled(logp) + logp.square().sum(), logp, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(gradient.sum(), logp)

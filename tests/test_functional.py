"""The plain functions against the oracle's closed forms, the textbook, and `policy_loss` itself."""

import inspect

import numpy as np
import pytest
import torch

import trustrl
import trustrl.functional as F
from support import oracle
from support.worlds import grad_of, run, world

ON_ONE_ANCHOR = {
    "dppo-binary-tv": "dppo_loss",
    "dppo-binary-kl": "dppo_kl_loss",
    "ppo": "ppo_loss",
    "cispo": "cispo_loss",
    "pg-is": "policy_gradient_loss",
    "sapo": "sapo_loss",
    "spo": "spo_loss",
    "drpo": "drpo_loss",
    "ipo": "ipo_loss",
    "kpop": "kpop_loss",
    "trm-sampled": "trm_loss",
    "opsm": "opsm_loss",
    "vespo": "vespo_loss",
    "m2po": "m2po_loss",
}
MISMATCH = {"tis": F.tis_weight, "icepop": F.icepop_weight, "mis": F.mis_weight}


def tensors(w, anchor="behavior"):
    logp = w.at_token(w.policy).clone().requires_grad_()
    return logp, w.at_token(w.anchor(anchor)), w.advantage, w.in_loss


def gradient(loss, logp):
    loss.sum().backward()
    return logp.grad


def closed_form(name, w):
    """−M·w·A of the oracle, 0 outside the loss."""
    case = w.case()
    return torch.from_numpy(np.where(w.in_loss.numpy(), -oracle.factors(name, case) * case.advantage, 0.0))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ON_ONE_ANCHOR)
def test_a_loss_has_the_gradient_of_its_paper(name, seed):
    w = world(seed, drift=1.0)
    logp, *others = tensors(w)
    found = gradient(getattr(F, ON_ONE_ANCHOR[name])(logp, *others), logp)
    torch.testing.assert_close(found, closed_form(name, w), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["dppo-binary-tv", "ppo", "ipo"])
def test_the_worlds_of_these_tests_have_masked_and_unmasked_tokens(name):
    w = world(0, drift=1.0)
    acting = closed_form(name, w) != 0
    assert 0.1 < acting.double().mean() < 0.9


def test_gspo_divides_by_nothing_so_that_the_caller_averages():
    w = world(1, drift=0.02)
    logp, *others = tensors(w)
    loss = F.gspo_loss(logp, *others)
    lengths = w.in_loss.sum(-1, keepdim=True).clamp(min=1)
    found = gradient(loss / lengths / len(lengths), logp)
    _, policy = run("gspo", w)
    torch.testing.assert_close(found, grad_of(policy.logp), rtol=1e-9, atol=1e-12)


def test_gmpo_divides_by_nothing_either():
    w = world(1, drift=0.4)
    logp, *others = tensors(w)
    lengths = w.in_loss.sum(-1, keepdim=True).clamp(min=1)
    found = gradient(F.gmpo_loss(logp, *others) / lengths / len(lengths), logp)
    torch.testing.assert_close(found, grad_of(run("gmpo", w)[1].logp), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [*ON_ONE_ANCHOR, "dppo-topk-tv", "minirl"])
def test_the_terms_are_those_of_policy_loss(name):
    w = world(2, drift=0.7)
    out, _ = run(name, w)
    if name == "dppo-topk-tv":
        rollout = w.rollout()
        loss = F.dppo_topk_loss(w.policy_tokens(rollout), rollout)
    elif name == "minirl":
        logp, behavior, advantage, in_loss = tensors(w)
        loss = F.minirl_loss(logp, behavior, w.at_token(w.proximal), advantage, in_loss)
    else:
        loss = getattr(F, ON_ONE_ANCHOR[name])(*tensors(w))
    assert loss.shape == w.in_loss.shape
    assert not loss[~w.in_loss].any()
    if name != "ppo":  # the function has the textbook value, the preset the mask's
        torch.testing.assert_close(loss.sum(), out.loss, rtol=1e-9, atol=1e-12)


def test_ppo_is_the_textbooks_clip():
    w = world(3, drift=0.6)
    logp, anchor, advantage, in_loss = tensors(w)
    again = logp.detach().clone().requires_grad_()
    ratio = torch.exp(again - anchor)
    textbook = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    textbook = torch.where(in_loss, textbook, 0.0)
    loss = F.ppo_loss(logp, anchor, advantage, in_loss)
    torch.testing.assert_close(loss, textbook)
    torch.testing.assert_close(gradient(loss, logp), gradient(textbook, again))


@pytest.mark.parametrize("name", MISMATCH)
def test_a_mismatch_weight_times_ppo_is_the_corrected_preset(name):
    w = world(4, mismatch=1.0)
    logp, anchor, advantage, in_loss = tensors(w, "proximal")
    weight = MISMATCH[name](anchor, w.at_token(w.behavior), in_loss)
    assert not weight.requires_grad
    found = gradient(weight * F.ppo_loss(logp, anchor, advantage, in_loss), logp)
    torch.testing.assert_close(found, closed_form(name, w), rtol=1e-9, atol=1e-12)
    k = torch.exp(anchor - w.at_token(w.behavior))
    assert ((weight != k) & in_loss).any(), "the bounds must act"


def test_topk_tv_contains_the_exact_distance():
    w = world(5)
    ids = w.behavior.topk(8, dim=-1).indices
    found = F.topk_tv(
        w.at_token(w.policy),
        w.at_token(w.behavior),
        w.tokens,
        ids,
        w.policy.gather(-1, ids),
        w.behavior.gather(-1, ids),
    )
    exact = 0.5 * (w.behavior.exp() - w.policy.exp()).abs().sum(-1)
    assert (found.lower <= exact + 1e-12).all()
    assert (exact <= found.upper + 1e-12).all()
    case = w.case()
    for i, t in ((0, 0), (1, 5), (3, 15)):
        known = oracle.support(case.full_b[i, t], w.tokens[i, t], 8)
        want = oracle.tv_interval(case.full_b[i, t], case.full_p[i, t], known)
        assert (found.lower[i, t].item(), found.upper[i, t].item()) == pytest.approx(want, abs=1e-12)


def test_faulty_tokens_have_no_term_and_no_gradient():
    logp = torch.tensor([-1.0, torch.nan, -torch.inf, 0.5], requires_grad=True)
    behavior = torch.tensor([-1.1, -1.0, -1.0, -1.0])
    loss = F.dppo_loss(logp, behavior, torch.ones(4), torch.ones(4, dtype=torch.bool))
    assert loss[1:].tolist() == [0.0, 0.0, 0.0]
    assert gradient(loss, logp)[1:].tolist() == [0.0, 0.0, 0.0]
    assert loss[0] != 0


@pytest.mark.parametrize("name", [one for one in F.__all__ if one.endswith(("_loss", "_weight"))])
def test_every_function_gives_its_equation_and_fits_a_screen(name):
    function = getattr(F, name)
    assert inspect.getdoc(function).startswith("Returns")
    assert len(inspect.getsource(function).splitlines()) <= 40


def test_every_preset_on_the_sampled_token_has_a_function():
    """Presets that are another preset's function with settings or a weight, or a point on the axes, are named here."""
    sampled = {
        name
        for name in trustrl.presets()
        if not (trustrl.preset(name).needs().topk or trustrl.preset(name).needs().full)
    }
    composed = {"dppo-decoupled": F.dppo_loss, **MISMATCH}  # a weight times a loss anchored on π'
    by_settings = {
        "dppo-minimal",
        "ppo-relaxed",
        "dppo-binary-tv-scaling",
        "dppo-binary-kl-scaling",
        "dppo-binary-tv-capped",
    }
    of_sequences = {"tis-product", "mis-product", "divergence-gate"}  # corrections that `policy_loss` computes
    on_the_axes = {"dis", "flash-reinforce"}
    others = by_settings | of_sequences | on_the_axes
    assert sampled <= {*ON_ONE_ANCHOR, "gspo", "gmpo", "minirl", *composed, *others}

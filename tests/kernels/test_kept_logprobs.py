"""Log-probs inside kept sets, against a softmax over the whole vocabulary with the other ids masked."""

import pytest
import torch

from trustrl.kernels import kept_logprobs as module
from trustrl.kernels.kept_logprobs import kept_logprobs

N, D, V, K = 9, 12, 50, 8


def case(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    head = torch.randn(V, D, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, dtype=dtype, requires_grad=True)
    ids = torch.full((N, K), -1)
    for row in range(N - 1):  # the last row keeps nothing
        size = row % K + 1
        ids[row, torch.randperm(K)[:size]] = torch.randperm(V)[:size]
    return hidden, head, bias, ids


def masked(hidden, head, ids, temperature=1.0, bias=None, softcap=None):
    logits = hidden @ head.T if bias is None else hidden @ head.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    kept = (ids.unsqueeze(-1) == torch.arange(V)).any(1)
    logp = torch.log_softmax((logits / temperature).masked_fill(~kept, -torch.inf), -1)
    return logp.gather(-1, ids.clamp(min=0))


@pytest.mark.parametrize("chunk", [1 << 24, 3 * D, 1])
@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.7}, {"softcap": 2.0}, {"temperature": 1.3, "softcap": 3.0}], ids=str
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_a_masked_softmax(how, with_bias, chunk, monkeypatch):
    monkeypatch.setattr(module, "PAIR_ELEMENTS", chunk)
    hidden, head, bias, ids = case()
    inputs = [hidden, head, bias] if with_bias else [hidden, head]
    more = {**how, "bias": bias} if with_bias else how
    there = ids >= 0
    ours, theirs = kept_logprobs(hidden, head, ids, **more), masked(hidden, head, ids, **more)
    torch.testing.assert_close(ours[there], theirs[there])
    assert (ours[~there] == -torch.inf).all()
    weights = torch.randn(N, K, dtype=torch.float64)
    found = torch.autograd.grad((weights * ours)[there].sum(), inputs)
    expected = torch.autograd.grad((weights * theirs)[there].sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_gradcheck():
    hidden, head, bias, ids = case()
    there = ids >= 0
    assert torch.autograd.gradcheck(lambda h, w, b: kept_logprobs(h, w, ids, bias=b)[there], (hidden, head, bias))


def test_bf16_operands_are_multiplied_in_float32():
    hidden, head, _, ids = case(torch.bfloat16)
    ours = kept_logprobs(hidden, head, ids)
    assert ours.dtype == torch.float32
    there = ids >= 0
    torch.testing.assert_close(ours[there], masked(hidden.float(), head.float(), ids)[there])
    ours[there].sum().backward()
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16


def test_a_row_without_ids_has_no_gradient_and_no_nan():
    hidden, head, _, ids = case()
    ours = kept_logprobs(hidden, head, ids)
    (gradient,) = torch.autograd.grad(ours[ids >= 0].sum(), hidden)
    assert gradient.isfinite().all()
    assert (gradient[-1] == 0).all()


def test_no_ids_at_all():
    hidden, head, _, _ = case()
    assert (kept_logprobs(hidden, head, torch.full((N, 1), -1)) == -torch.inf).all()


def test_a_frozen_head_gets_no_gradient():
    hidden, head, _, ids = case()
    kept_logprobs(hidden, head.detach(), ids)[ids >= 0].sum().backward()
    assert hidden.grad is not None
    assert head.grad is None

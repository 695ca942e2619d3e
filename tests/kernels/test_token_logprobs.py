"""One pass over the vocabulary: an outside anchor for the definition, and no further from the truth than plain code."""

import pytest
import torch

from trustrl.kernels import token_logprobs_chunked, token_logprobs_reference

ULP = {torch.float64: 2e-15, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = {"tiny": (1, 3, 2, 1), "ragged": (37, 16, 101, 7), "wide": (5, 8, 300, 64), "K beyond V": (4, 8, 6, 9)}


def inputs(n, d, v, k, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, head = (torch.randn(rows, d, generator=g, dtype=torch.float64) for rows in (n, v))
    bias = 0.3 * torch.randn(v, generator=g, dtype=torch.float64)
    token = torch.randint(0, v, (n,), generator=g)
    ids = torch.randint(-2, v, (n, k), generator=g)  # out of order, repeated, some empty
    if k > 1:
        ids[:, 1] = ids[:, 0]
    ids[::3, -1] = token[::3]
    temperature = 0.5 + torch.rand(n, generator=g, dtype=torch.float64)
    return [x.to(dtype) for x in (hidden, head, bias)], token, ids, temperature


def test_the_definition_agrees_with_torch_distributions():
    """The anchor: without it, `/ temperature` → `* temperature` would pass every other test here."""
    (hidden, head, bias), token, ids, temperature = inputs(9, 4, 30, 5)
    ids = ids.clamp(min=0)
    raw = 3.0 * torch.tanh((hidden @ head.T + bias) / 3.0) / temperature.unsqueeze(-1)
    want = torch.distributions.Categorical(logits=raw)
    got = token_logprobs_reference(
        hidden, head, token, gather_ids_NK=ids, entropy=True, temperature=temperature, bias_V=bias, softcap=3.0
    )
    torch.testing.assert_close(got.logp, want.log_prob(token))
    torch.testing.assert_close(got.gathered_logp, want.log_prob(ids.T).T)
    torch.testing.assert_close(got.entropy, want.entropy())
    torch.testing.assert_close(got.logsumexp, torch.logsumexp(raw, -1))
    for i in range(9):
        known = {*ids[i].tolist(), int(token[i])}
        outside = [v for v in range(30) if v not in known]
        torch.testing.assert_close(got.tail_logp[i].exp(), want.probs[i, outside].sum())


SETTINGS = {
    "sampled token only": {"gather": False},
    "ids": {"gather": True},
    "everything": {"gather": True, "entropy": True, "bias": True, "softcap": 4.0, "temperature": True},
    "entropy alone": {"gather": False, "entropy": True},
}


def run(function, tensors, token, ids, temperature, settings, upstream=None, **cuts):
    """(outputs, gradients) as flat lists; upstream weights are drawn once and reused."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    hidden, head, bias = leaves
    out = function(
        hidden, head, token, gather_ids_NK=ids if settings.get("gather") else None, entropy=settings.get("entropy", False),
        temperature=temperature if settings.get("temperature") else 0.7, bias_V=bias if settings.get("bias") else None,
        softcap=settings.get("softcap"), **cuts,
    )  # fmt: skip
    found = {name: x for name, x in out._asdict().items() if x is not None}
    if upstream is None:
        g = torch.Generator().manual_seed(1)
        upstream = {name: torch.randn(x.shape, generator=g, dtype=torch.float64) for name, x in found.items()}
    total = sum((torch.where(x.isfinite(), x, 0.0).double() * upstream[name]).sum() for name, x in found.items())
    total.backward()
    grads = {f"d {n}": x.grad for n, x in zip(("hidden", "head", "bias"), leaves, strict=True) if x.grad is not None}
    return {**{n: x.detach() for n, x in found.items()}, **grads}, upstream


@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_further_from_the_truth_than_the_plain_code(shape, settings, dtype):
    tensors, token, ids, temperature = inputs(*shape, dtype=dtype)
    exact = [x.double() for x in tensors]
    truth, upstream = run(token_logprobs_reference, exact, token, ids, temperature, settings)
    plain, _ = run(token_logprobs_reference, tensors, token, ids, temperature, settings, upstream)
    fast, _ = run(
        token_logprobs_chunked, tensors, token, ids, temperature, settings, upstream, block_rows=10, block_vocab=13
    )
    assert truth.keys() == fast.keys()
    for name, t in truth.items():
        finite = t.isfinite()
        assert torch.equal(finite, fast[name].isfinite()), name
        t, p, f = t[finite], plain[name][finite].double(), fast[name][finite].double()
        allowed = (t - p).abs().max() + ULP[dtype] * t.abs().max().clamp(min=1.0)
        worst = (t - f).abs().max()
        assert worst <= allowed, f"{name}: error {worst:.2e}, the plain code makes {allowed:.2e}"


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_gradcheck(settings):
    tensors, token, ids, temperature = inputs(4, 3, 9, 3)
    ids = ids.clamp(min=0)

    def outputs(hidden, head, bias):
        out = token_logprobs_chunked(
            hidden, head, token, gather_ids_NK=ids if settings.get("gather") else None,
            entropy=settings.get("entropy", False), temperature=temperature, bias_V=bias, softcap=settings.get("softcap"),
            block_rows=3, block_vocab=4,
        )  # fmt: skip
        return tuple(x for x in out if x is not None)

    assert torch.autograd.gradcheck(outputs, [x.requires_grad_() for x in tensors])


def test_head_repair_makes_the_given_ids_right_in_bf16():
    """Rounding is left only in the tail: with the mass on the given ids, the log-prob is right although logits are bf16."""
    g = torch.Generator().manual_seed(0)
    head = torch.randn(500, 64, generator=g).bfloat16()
    hidden = (3.0 * head[:40].float() / 8 + 0.1 * torch.randn(40, 64, generator=g)).bfloat16()  # peaked on its own id
    ids = (hidden.float() @ head.float().T).topk(16, -1).indices
    token = ids[:, 0]
    truth = token_logprobs_reference(hidden.double(), head.double(), token)
    plain = token_logprobs_reference(hidden, head, token)
    fast = token_logprobs_chunked(hidden, head, token, gather_ids_NK=ids)
    error = (fast.logp.double() - truth.logp).abs()
    rounding = ((hidden @ head.T).double() - hidden.double() @ head.double().T).abs().max()
    assert (error <= fast.tail_logp.double().exp() * rounding * 1.01 + 1e-5).all()
    assert error.max() < 0.1 * (plain.logp.double() - truth.logp).abs().max()


def test_a_frozen_head_gets_no_gradient_and_a_hidden_one_does():
    (hidden, head, _), token, ids, _ = inputs(5, 4, 20, 3)
    hidden.requires_grad_()
    token_logprobs_chunked(hidden, head, token, gather_ids_NK=ids, block_vocab=7).tail_logp.sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_rows_without_a_coefficient_have_no_gradient():
    (hidden, head, _), token, ids, _ = inputs(6, 4, 20, 3)
    hidden.requires_grad_()
    out = token_logprobs_chunked(hidden, head, token, gather_ids_NK=ids.clamp(min=0), entropy=True)
    weight = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    (weight * (out.logp + out.entropy + out.tail_logp)).sum().backward()
    assert (hidden.grad[weight == 0] == 0).all()
    assert (hidden.grad[weight != 0] != 0).any(-1).all()


def test_an_empty_batch():
    (hidden, head, _), token, ids, _ = inputs(3, 4, 20, 3)
    out = token_logprobs_chunked(hidden[:0], head, token[:0], gather_ids_NK=ids[:0], entropy=True)
    assert all(x.shape[0] == 0 for x in out)

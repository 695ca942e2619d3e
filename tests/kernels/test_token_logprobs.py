"""One pass over the vocabulary: an outside anchor for the definition, and no further from the truth than plain code."""

import math
import warnings

import pytest
import torch
from research.loss_in_forward import loss_in_forward
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import trustrl
from support.largest_tensor import LargestTensor
from trustrl.core.token_logprobs import AnchorStates
from trustrl.kernels import chunked_pass, tile_math
from trustrl.kernels.reference import token_logprobs_reference

# float64 has no wider truth to be held against: room for another order of summation.
ULP = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = {
    "tiny": (1, 3, 2, 1),
    "ragged": (37, 16, 101, 7),
    "K = 20": (23, 16, 97, 20),
    "K = 64": (5, 8, 300, 64),
    "K = 256": (6, 12, 700, 256),
    "K beyond V": (4, 8, 6, 9),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def inputs(n, d, v, k, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, head = (torch.randn(rows, d, generator=g, dtype=torch.float64) for rows in (n, v))
    bias = 0.3 * torch.randn(v, generator=g, dtype=torch.float64)
    token = torch.randint(0, v, (n,), generator=g)
    if n > 3:
        token[2] = -100  # an ignored row
    ids = torch.randint(-2, v, (n, k), generator=g)  # out of order, repeated, some empty
    if k > 1:
        ids[:, 1] = ids[:, 0]
    ids[::3, -1] = token[::3]
    temperature = 0.5 + torch.rand(n, generator=g, dtype=torch.float64)
    return [x.to(dtype) for x in (hidden, head, bias)], token, ids, temperature


def test_the_definition_agrees_with_torch_distributions():
    """The anchor: without it, `/ temperature` → `* temperature` would pass every other test here."""
    (hidden, head, bias), token, ids, temperature = inputs(9, 4, 30, 5)
    ids, token = ids.clamp(min=0), token.clamp(min=0)
    raw = 3.0 * torch.tanh((hidden @ head.T + bias) / 3.0) / temperature.unsqueeze(-1)
    want = torch.distributions.Categorical(logits=raw)
    other = torch.randn(30, 4, dtype=torch.float64)
    anchor = torch.distributions.Categorical(
        logits=3.0 * torch.tanh((hidden @ other.T) / 3.0) / temperature.unsqueeze(-1)
    )
    got = trustrl.token_logprobs(
        hidden, head, token, gather_ids=ids, entropy=True, top_k=4, temperature=temperature, bias=bias, softcap=3.0,
        against=AnchorStates(hidden, other), impl="reference",
    )  # fmt: skip
    torch.testing.assert_close(got.logp, want.log_prob(token))
    torch.testing.assert_close(got.gathered_logp, want.log_prob(ids.T).T)
    torch.testing.assert_close(got.entropy, want.entropy())
    torch.testing.assert_close(got.logsumexp, torch.logsumexp(raw, -1))
    torch.testing.assert_close(got.kl, torch.distributions.kl_divergence(anchor, want))
    torch.testing.assert_close(got.tv, (anchor.probs - want.probs).abs().sum(-1) / 2)
    for i in range(9):
        known = {*ids[i].tolist(), int(token[i])}
        outside = [v for v in range(30) if v not in known]
        torch.testing.assert_close(got.tail_logp[i].exp(), want.probs[i, outside].sum())
        best = sorted(range(30), key=lambda v: -want.probs[i, v])[:4]
        assert got.topk.ids[i].tolist() == best
    torch.testing.assert_close(got.topk.logp, want.log_prob(got.topk.ids.T).T)


SETTINGS = {
    "sampled token only": {},
    "ids": {"gather": True},
    "everything": {"gather": True, "entropy": True, "bias": True, "softcap": 4.0, "temperature": True},
    "entropy alone": {"entropy": True},
    "own top-K": {"gather": True, "entropy": True, "bias": True, "top_k": 3},
    "own top-K only": {"top_k": 2, "softcap": 2.0},
    "frozen head": {"gather": True, "frozen": True, "softcap": 4.0, "bias": True},
    "frozen head, own top-K": {"gather": True, "frozen": True, "top_k": 5, "temperature": True},
    "frozen head, entropy": {"gather": True, "frozen": True, "entropy": True},
}


def run(tensors, token, ids, temperature, settings, upstream=None, **cuts):
    """(outputs, gradients) as flat dictionaries; upstream weights are drawn once and reused."""
    leaves = [x.detach().clone() for x in tensors]
    for leaf in leaves[: 1 if settings.get("frozen") else 3]:
        leaf.requires_grad_()
    hidden, head, bias = leaves
    out = trustrl.token_logprobs(
        hidden, head, token, gather_ids=ids if settings.get("gather") else None, entropy=settings.get("entropy", False),
        temperature=temperature if settings.get("temperature") else 0.7, bias=bias if settings.get("bias") else None,
        softcap=settings.get("softcap"), top_k=min(settings.get("top_k", 0), len(head)), **cuts,
    )  # fmt: skip
    found = {n: x for n, x in out._asdict().items() if x is not None and n not in ("topk", "logp_error")}
    if out.topk is not None:
        found["top logp"] = out.topk.logp
        found["top tail"] = out.topk.tail_logp
    if upstream is None:
        g = torch.Generator().manual_seed(1)
        upstream = {name: torch.randn(x.shape, generator=g, dtype=torch.float64) for name, x in found.items()}
    total = sum((torch.where(x.isfinite(), x, 0.0).double() * upstream[name]).sum() for name, x in found.items())
    total.backward()
    grads = {f"d {n}": x.grad for n, x in zip(("hidden", "head", "bias"), leaves, strict=True) if x.grad is not None}
    return {**{n: x.detach() for n, x in found.items()}, **grads}, upstream


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_further_from_the_truth_than_the_plain_code(shape, settings, dtype):
    if settings.get("top_k") and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("rounded products tie, and which of two ids is taken is a matter of luck; see the next test")
    tensors, token, ids, temperature = inputs(*shape, dtype=dtype)
    exact = [x.double() for x in tensors]
    truth, upstream = run(exact, token, ids, temperature, settings, impl="reference")
    plain, _ = run(tensors, token, ids, temperature, settings, upstream, impl="reference")
    fast, _ = run(tensors, token, ids, temperature, settings, upstream, impl="chunked", block_rows=10, block_vocab=13)
    assert truth.keys() == fast.keys()
    for name, t in truth.items():
        finite = t.isfinite()
        assert torch.equal(finite, fast[name].isfinite()), name
        if not finite.any():  # no tail is left anywhere
            continue
        t, p, f = t[finite], plain[name][finite].double(), fast[name][finite].double()
        allowed = (t - p).abs().max() + ULP[dtype] * t.abs().max().clamp(min=1.0)
        worst = (t - f).abs().max()
        assert worst <= allowed, f"{name}: error {worst:.2e}, the plain code makes {allowed:.2e}"


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_own_top_k_misses_no_id_by_more_than_the_rounding_of_its_product(dtype, frozen):
    """Tiles of 64 take the way of groups, with rows whose best lie anywhere."""
    (hidden, head, _), token, _, _ = inputs(37, 16, 1000, 1, dtype=dtype)
    token = token.clamp(min=0)
    hidden.requires_grad_()
    head.requires_grad_(not frozen)
    out = trustrl.token_logprobs(hidden, head, token, top_k=7, block_rows=10, block_vocab=64)
    truth = torch.log_softmax(hidden.double() @ head.double().T, -1)
    rounding = 2 * torch.finfo(dtype).eps * (hidden.double() @ head.double().T).abs().max()
    best = truth.topk(7).values
    chosen = truth.gather(-1, out.topk.ids)
    assert (out.topk.ids.sort(-1).values.diff(dim=-1) > 0).all()
    assert (best - chosen.sort(-1, descending=True).values <= rounding).all()
    assert (out.topk.logp.diff(dim=-1) <= 0).all()
    slack = out.logp_error.unsqueeze(-1) if dtype != torch.float64 else 1e-12
    assert ((out.topk.logp - chosen).abs() <= slack).all()
    weight = torch.randn(37, 7, dtype=torch.float64)
    (out.topk.logp * weight).sum().backward()
    again = hidden.detach().double().requires_grad_()
    (torch.log_softmax(again @ head.detach().double().T, -1).gather(-1, out.topk.ids) * weight).sum().backward()
    assert (hidden.grad - again.grad).abs().max() <= 32 * torch.finfo(dtype).eps * again.grad.abs().max()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_gradcheck(settings):
    tensors, token, ids, temperature = inputs(4, 3, 9, 3)
    token, ids = token.clamp(min=0), ids.clamp(min=0)
    frozen = settings.get("frozen", False)

    def outputs(hidden, head, bias):
        out = trustrl.token_logprobs(
            hidden, head, token, gather_ids=ids if settings.get("gather") else None,
            entropy=settings.get("entropy", False), temperature=temperature, bias=bias, softcap=settings.get("softcap"),
            top_k=settings.get("top_k", 0), block_rows=3, block_vocab=4,
        )  # fmt: skip
        top = () if out.topk is None else (out.topk.logp,)
        return (
            *top,
            *(x for x in (out.logp, out.logsumexp, out.gathered_logp, out.tail_logp, out.entropy) if x is not None),
        )

    for leaf in tensors[: 1 if frozen else 3]:
        leaf.requires_grad_()
    assert torch.autograd.gradcheck(outputs, tensors)


@pytest.mark.usefixtures("both_ways")
def test_logits_that_grow_through_the_vocabulary_raise_the_shift_and_lose_nothing():
    """Each tile's largest logit is 60 above the last one's: a fixed shift would overflow, the first tile's would lose."""
    hidden = torch.ones(3, 1)
    head = torch.linspace(-400, 400, 200).unsqueeze(-1)
    for order in (head, head.flip(0), head[torch.randperm(200, generator=torch.Generator().manual_seed(0))]):
        want = token_logprobs_reference(hidden.double(), order.double(), torch.tensor([0, 100, 199]), entropy=True)
        got = trustrl.token_logprobs(hidden, order, torch.tensor([0, 100, 199]), entropy=True, block_vocab=15)
        torch.testing.assert_close(got.logp.double(), want.logp, rtol=0, atol=1e-4)
        torch.testing.assert_close(got.entropy.double(), want.entropy, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("both_ways")
def test_a_tail_of_1e_minus_30_is_exact_where_one_minus_the_sum_is_zero():
    hidden, head = torch.ones(1, 1), torch.zeros(100, 1)
    head[7] = 75.0
    out = trustrl.token_logprobs(hidden, head, torch.tensor([7]), gather_ids=torch.tensor([[7, 7]]), block_vocab=9)
    assert float(1 - out.logp.exp()) == 0.0
    torch.testing.assert_close(out.tail_logp, torch.tensor([99.0]).log() - 75.0)


@pytest.mark.usefixtures("both_ways")
def test_words_removed_by_a_bias_of_minus_infinity_hold_no_mass():
    hidden, head = torch.randn(4, 3), torch.randn(20, 3)
    bias = torch.zeros(20)
    bias[10:] = -torch.inf
    head.requires_grad_()
    out = trustrl.token_logprobs(
        hidden, head, torch.tensor([0, 1, 2, 3]), bias=bias, entropy=True, top_k=12, block_vocab=6
    )
    want = token_logprobs_reference(hidden, head[:10], torch.tensor([0, 1, 2, 3]), entropy=True)
    torch.testing.assert_close(out.entropy, want.entropy)
    assert (out.topk.ids[:, 10:] == -1).all()
    out.entropy.sum().backward()
    assert head.grad.isfinite().all()
    assert (head.grad[10:] == 0).all()


def peaked(num_rows=40, vocabulary=500, size=64):
    g = torch.Generator().manual_seed(0)
    head = torch.randn(vocabulary, size, generator=g).bfloat16()
    hidden = 3.0 * head[:num_rows].float() / 8 + 0.1 * torch.randn(num_rows, size, generator=g)
    return hidden.bfloat16(), head


@pytest.mark.usefixtures("both_ways")
def test_head_repair_makes_the_given_ids_right_in_bf16_and_the_bound_holds():
    """Rounding is left only in the tail: with the mass on the given ids, the log-prob is right although logits are bf16."""
    hidden, head = peaked()
    ids = (hidden.float() @ head.float().T).topk(16, -1).indices
    token = ids[:, 0]
    truth = token_logprobs_reference(hidden.double(), head.double(), token)
    plain = token_logprobs_reference(hidden, head, token)
    for given, factor in ((ids, 0.1), (None, 1.01)):
        fast = trustrl.token_logprobs(hidden, head, token, gather_ids=given)
        error = (fast.logp.double() - truth.logp).abs()
        assert (error <= fast.logp_error.double()).all()
        assert error.max() < factor * (plain.logp.double() - truth.logp).abs().max()
    wide = trustrl.token_logprobs(hidden, head, token, product_dtype=torch.float32)
    assert (wide.logp.double() - truth.logp).abs().max() < 1e-5
    assert wide.logp_error.max() < 1e-4


def test_the_bound_grows_with_the_mass_outside_the_given_ids():
    hidden, head = peaked()
    ids = (hidden.float() @ head.float().T).topk(64, -1).indices
    bounds = [
        trustrl.token_logprobs(hidden, head, ids[:, 0], gather_ids=ids[:, :k]).logp_error.mean() for k in (1, 8, 64)
    ]
    assert bounds[0] > bounds[1] > bounds[2] > 0


@pytest.mark.usefixtures("both_ways")
def test_exact_divergence_of_a_policy_from_itself_is_zero_and_from_a_near_one_does_not_cancel():
    hidden, head = peaked()
    token = torch.arange(40)
    same = trustrl.token_logprobs(hidden, head, token, against=AnchorStates(hidden, head))
    assert (same.tv == 0).all()
    assert (same.kl == 0).all()
    near = (head.double() * (1 + 1e-5 * torch.randn(head.shape, dtype=torch.float64))).float()
    truth = trustrl.token_logprobs(
        hidden.double(), head.double(), token, against=AnchorStates(hidden.double(), near.double()), impl="reference"
    )
    got = trustrl.token_logprobs(hidden.float(), head.float(), token, against=AnchorStates(hidden.float(), near))
    assert truth.kl.max() < 1e-8
    torch.testing.assert_close(got.tv.double(), truth.tv, rtol=0.05, atol=1e-6)
    assert (got.kl >= 0).all()
    assert (got.kl.double() - truth.kl).abs().max() < 1e-9


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    "settings", [SETTINGS["sampled token only"], SETTINGS["everything"]], ids=["plain", "everything"]
)
def test_exact_divergences_agree_with_the_definition(settings):
    (hidden, head, bias), token, ids, temperature = inputs(37, 16, 101, 7)
    other = AnchorStates(hidden + 0.1 * torch.randn_like(hidden), head + 0.1 * torch.randn_like(head), bias=2 * bias)
    kw = {
        "gather_ids": ids,
        "against": other,
        "temperature": temperature,
        "bias": bias,
        "softcap": settings.get("softcap"),
    }
    want = trustrl.token_logprobs(hidden, head, token, impl="reference", **kw)
    got = trustrl.token_logprobs(hidden, head, token, block_rows=10, block_vocab=13, **kw)
    torch.testing.assert_close(got.tv, want.tv)
    torch.testing.assert_close(got.kl, want.kl)
    lse = trustrl.token_logprobs(
        other.hidden, other.head, token, temperature=temperature, bias=other.bias, softcap=settings.get("softcap")
    ).logsumexp
    known = trustrl.token_logprobs(hidden, head, token, **{**kw, "against": other._replace(logsumexp=lse)})
    torch.testing.assert_close(known.kl, want.kl)


@pytest.fixture
def watched(monkeypatch):
    """Runs a call with a dispatch mode inside the passes: an operator of our own hides its insides from modes around it."""

    def run(make_mode, call):
        modes = []
        for name in ("forward", "backward"):
            real = getattr(chunked_pass, name)

            def inside(*args, real=real, **kwargs):
                modes.append(make_mode())
                with modes[-1]:
                    return real(*args, **kwargs)

            monkeypatch.setattr(chunked_pass, name, inside)
        call()
        monkeypatch.undo()
        return modes

    return run


def test_only_what_is_asked_for_is_multiplied(watched):
    """Counted, not timed: products of N × V × D, forward and backward."""
    (hidden, head, _), token, ids, _ = inputs(20, 8, 60, 4)
    token = token.clamp(min=0)
    one = 2 * 20 * 60 * 8

    def flops(call):
        modes = watched(lambda: FlopCounterMode(display=False), call)
        return sum(mode.get_total_flops() for mode in modes)

    def products(frozen, entropy, weight=None):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_(not frozen)

        def call():
            out = trustrl.token_logprobs(h, w, token, gather_ids=ids, entropy=entropy)
            total = out.logp + out.tail_logp + (out.entropy if entropy is True else 0.0)
            (total if weight is None else weight * total).sum().backward()

        return flops(call) / one

    assert products(frozen=False, entropy=True) == pytest.approx(4)  # logits twice, two gradients
    assert products(frozen=True, entropy=True) == pytest.approx(3)
    assert products(frozen=True, entropy="detached") == pytest.approx(2)  # nothing is recomputed
    quarter = (torch.arange(20) % 4 == 0).double()
    assert products(False, True, quarter) == pytest.approx(1 + 3 / 4)
    assert products(False, True, 0 * quarter) == pytest.approx(1)
    ignored = torch.where(quarter.bool(), token, -1)
    with torch.no_grad():
        assert flops(lambda: trustrl.token_logprobs(hidden, head, ignored)) / one == pytest.approx(1 / 4)


@pytest.mark.usefixtures("both_ways")
def test_rows_without_a_coefficient_have_no_gradient():
    (hidden, head, _), token, ids, _ = inputs(6, 4, 20, 3)
    hidden.requires_grad_()
    out = trustrl.token_logprobs(hidden, head, token.clamp(min=0), gather_ids=ids.clamp(min=0), entropy=True)
    weight = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    (weight * (out.logp + out.entropy + out.tail_logp)).sum().backward()
    assert (hidden.grad[weight == 0] == 0).all()
    assert (hidden.grad[weight != 0] != 0).any(-1).all()


@pytest.mark.usefixtures("both_ways")
def test_no_tensor_of_tokens_times_vocabulary_ever_exists(watched):
    (hidden, head, bias), token, ids, _ = inputs(200, 4, 3000, 5, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, head, bias)]

    def everything():
        out = trustrl.token_logprobs(
            *leaves[:2], token, gather_ids=ids, entropy=True, top_k=5, bias=bias, block_rows=64, block_vocab=128,
            against=AnchorStates(hidden.detach(), head.detach()),
        )  # fmt: skip
        (out.logp + out.tail_logp + out.entropy).sum().backward()

    inside = max(mode.elements for mode in watched(LargestTensor, everything))
    assert 64 * 128 <= inside <= max(3000 * 4, 2 * 64 * 128)
    with LargestTensor() as around:
        everything()
    assert around.elements <= max(3000 * 4, 2 * 64 * 128)
    with LargestTensor() as largest:
        trustrl.token_logprobs(hidden, head, token, impl="reference")
    assert largest.elements == 200 * 3000


@pytest.mark.usefixtures("both_ways")
def test_under_autocast_the_products_are_made_as_the_models_own_head_would():
    (hidden, head, _), token, ids, _ = inputs(20, 16, 60, 4, dtype=torch.float32)
    states = hidden.bfloat16().requires_grad_()
    head.requires_grad_()
    want = token_logprobs_reference(
        hidden.bfloat16().double(), head.detach().bfloat16().double(), token, gather_ids=ids
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (states, hidden):  # a final norm may keep float32
            got = trustrl.token_logprobs(given, head, token, gather_ids=ids)
            assert got.logp.dtype == torch.float32
            error = (got.logp.double() - want.logp).abs()
            assert (error <= got.logp_error).all()
        got.logp.sum().backward()
        trustrl.token_logprobs(states, head, token).logp.sum().backward()
    assert head.grad.dtype == torch.float32
    assert states.grad.dtype == torch.bfloat16


@pytest.mark.usefixtures("both_ways")
def test_inside_a_checkpointed_model():
    (hidden, head, _), token, ids, _ = inputs(9, 4, 30, 5)
    grads = []
    for wrap in (lambda f, *a: f(*a), lambda f, *a: checkpoint(f, *a, use_reentrant=False)):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        out = wrap(lambda h, w: trustrl.token_logprobs(h.sin(), w, token, gather_ids=ids, entropy=True).entropy, h, w)
        out.sum().backward()
        grads.append((h.grad, w.grad))
    for plain, again in zip(*grads, strict=True):
        torch.testing.assert_close(plain, again, rtol=0, atol=0)


@pytest.mark.compiled
@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_inside_a_compiled_model_as_one_graph(frozen):
    (hidden, head, _), token, ids, _ = inputs(9, 4, 30, 5)

    def loss(h, w):
        out = trustrl.token_logprobs(h.sin(), w, token, gather_ids=ids, entropy="detached" if frozen else True)
        return out.logp.sum() + out.tail_logp.sum() + (0.0 if frozen else out.entropy.sum())

    grads = []
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_(not frozen)
        call(h, w).backward()
        grads.append([x.grad for x in (h, w) if x.grad is not None])
    for plain, compiled in zip(*grads, strict=True):
        torch.testing.assert_close(plain, compiled)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.compiled
def test_compiled_tiles_give_what_eager_ones_give(monkeypatch):
    monkeypatch.setattr(tile_math, "WORTH_COMPILING", 0)
    for settings in (SETTINGS["everything"], SETTINGS["frozen head"]):
        tensors, token, ids, temperature = inputs(33, 16, 301, 7, dtype=torch.float32)
        exact = [x.double() for x in tensors]
        truth, upstream = run(exact, token, ids, temperature, settings, impl="reference")
        fast, _ = run(tensors, token, ids, temperature, settings, upstream, block_rows=16, block_vocab=64)
        for name, t in truth.items():
            finite = t.isfinite()
            torch.testing.assert_close(fast[name].double()[finite], t[finite], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("log_m", [-102.0, -95.0, -89.0, -50.0, -2.5, -1.0, -0.1, 0.0])
@pytest.mark.parametrize("log_p", [-120.0, -60.0, -2.0, -0.1, 0.0])
def test_a_term_of_the_divergence_is_float64s_at_any_distance(log_p, log_m):
    """At log p = 0, log m = -95 the term is about 1, where eˣ alone overflows float32."""
    x = log_p - log_m
    truth = math.exp(log_m) * (math.expm1(x) - x)
    found = tile_math.divergence_terms(torch.tensor(log_p), torch.tensor(log_m))[1]
    assert float(found) == pytest.approx(truth, rel=2e-5, abs=1e-40)


@pytest.mark.compiled
def test_every_kind_of_tile_is_compiled_beyond_torchs_limit_for_one_function():
    """Without copies, the second kind would run uncompiled without a word."""
    fused = tile_math.FusedFunction(tile_math.divergence_terms)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(recompile_limit=1):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            fused(torch.zeros(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype), large=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 3


def test_without_a_compiler_it_runs_uncompiled_and_says_so(monkeypatch):
    def no_compiler(*args, **kwargs):
        def call(*a, **k):
            raise RuntimeError("no C++ compiler")

        return call

    monkeypatch.setattr(torch, "compile", no_compiler)
    fused = tile_math.FusedFunction(tile_math.summary)
    tile = torch.randn(4, 9)
    args = (tile, None, torch.ones(4, 1), None, torch.zeros(4, 1), -1)
    with pytest.warns(UserWarning, match="could not be compiled"):
        got = fused(*args, large=True)
    torch.testing.assert_close(got[2], tile.exp().sum(-1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused(*args, large=True)  # said once


def test_an_entropy_asked_for_without_a_gradient_has_none():
    (hidden, head, _), token, _, _ = inputs(6, 4, 20, 3)
    out = trustrl.token_logprobs(hidden.requires_grad_(), head, token, entropy="detached")
    assert not out.entropy.requires_grad
    assert out.logp.requires_grad


@pytest.mark.usefixtures("both_ways")
def test_an_empty_batch():
    (hidden, head, _), token, ids, _ = inputs(3, 4, 20, 3)
    head.requires_grad_()
    out = trustrl.token_logprobs(hidden[:0], head, token[:0], gather_ids=ids[:0], entropy=True, top_k=2)
    assert all(x.shape[0] == 0 for x in out if isinstance(x, torch.Tensor))
    out.entropy.sum().backward()
    assert (head.grad == 0).all()


@pytest.mark.usefixtures("both_ways")
def test_a_batch_of_ignored_rows():
    (hidden, head, _), token, ids, _ = inputs(3, 4, 20, 3)
    head.requires_grad_()
    out = trustrl.token_logprobs(
        hidden, head, torch.full_like(token, -100), gather_ids=ids, entropy=True, top_k=2,
        against=AnchorStates(hidden, head.detach()),
    )  # fmt: skip
    for x in (out.logp, out.logsumexp, out.tail_logp, out.entropy, out.logp_error, out.tv, out.kl):
        assert (x == 0).all()
    assert (out.gathered_logp == -torch.inf).all()
    assert (out.topk.ids == -1).all()
    (out.logp + out.entropy + out.tail_logp).sum().backward()
    assert (head.grad == 0).all()


@pytest.mark.usefixtures("both_ways")
def test_nan_in_an_ignored_row_reaches_no_gradient():
    (hidden, head, _), token, ids, _ = inputs(6, 4, 20, 3)
    hidden[2] = torch.nan  # token[2] is ignored
    hidden.requires_grad_()
    head.requires_grad_()
    out = trustrl.token_logprobs(hidden, head, token, gather_ids=ids)
    (out.logp + out.tail_logp).sum().backward()
    assert head.grad.isfinite().all()
    assert hidden.grad.isfinite().all()


BAD = {
    "three axes": ({"hidden_ND": torch.zeros(2, 3, 4)}, "hidden_ND must be"),
    "another size": ({"head_VD": torch.zeros(9, 5)}, "head_VD must be"),
    "float ids": ({"token_ids_N": torch.zeros(3)}, "token_ids_N must be an integer tensor"),
    "too few ids": ({"token_ids_N": torch.zeros(2, dtype=torch.long)}, "token_ids_N must be of 3 rows"),
    "flat gather": ({"gather_ids": torch.zeros(3, dtype=torch.long)}, "gather_ids must be"),
    "short bias": ({"bias": torch.zeros(8)}, "bias must be of shape"),
    "temperature 0": ({"temperature": 0.0}, "temperature must be"),
    "softcap 0": ({"softcap": 0.0}, "softcap must be"),
    "top_k beyond": ({"top_k": 10}, "top_k must be"),
    "unknown impl": ({"impl": "cuda"}, "impl must be"),
    "unknown entropy": ({"entropy": "yes"}, "entropy must be"),
    "anchor of other tokens": ({"against": AnchorStates(torch.zeros(2, 4), torch.zeros(9, 4))}, "against.hidden must be"),
    "anchor of another vocabulary": ({"against": AnchorStates(torch.zeros(3, 4), torch.zeros(8, 4))}, "against.head must be"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused_in_a_sentence(change, message):
    given = {
        "hidden_ND": torch.zeros(3, 4),
        "head_VD": torch.zeros(9, 4),
        "token_ids_N": torch.zeros(3, dtype=torch.long),
    }
    with pytest.raises(trustrl.errors.TrustRLError, match=message):
        trustrl.token_logprobs(**{**given, **change})


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_gradients_made_in_the_forward_pass_are_the_same(frozen):
    (hidden, head, _), token, ids, _ = inputs(23, 6, 41, 5)
    weight = torch.randn(23, dtype=torch.float64)

    def part(out, rows):
        return (weight[rows] * (out.logp + out.tail_logp.exp() + 0.1 * out.entropy)).sum()

    results = []
    for in_forward in (True, False):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_(not frozen)
        if in_forward:
            settings = {"gather_ids": ids, "entropy": True, "temperature": 0.7, "block_rows": 10, "block_vocab": 9}
            value = loss_in_forward(h, w, token, part, **settings)
        else:
            out = trustrl.token_logprobs(h, w, token, gather_ids=ids, entropy=True, temperature=0.7, impl="reference")
            value = part(out, slice(None))
        (3 * value).backward()
        results.append([value.detach(), *(x.grad for x in (h, w) if x.grad is not None)])
    for made, want in zip(*results, strict=True):
        torch.testing.assert_close(made, want)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_tail_without_mass_has_a_gradient_of_zero(impl, frozen):
    hidden = torch.randn(2, 3, requires_grad=True)
    head = torch.randn(4, 3, requires_grad=not frozen)
    ids = torch.arange(4).expand(2, 4)
    out = trustrl.token_logprobs(hidden, head, torch.tensor([1, 2]), gather_ids=ids, top_k=4, impl=impl)
    for tail in (out.tail_logp, out.topk.tail_logp):
        assert (tail == -torch.inf).all()
        (gradient,) = torch.autograd.grad(tail.exp().sum(), hidden, retain_graph=True)
        assert torch.equal(gradient, torch.zeros(2, 3))

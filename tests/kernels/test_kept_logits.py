"""Products kept in the head gradient's buffer: the same gradients as recomputed ones, in the same memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import trustrl
from support.device_counts import as_on_an_accelerator, counted
from support.largest_tensor import LargestTensor
from trustrl.kernels import chunked_pass, vocab_pass

# As in test_token_logprobs.py. A product that is summed in another order differs by a unit in its last place.
ULP = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
V, K, TILE = 101, 5, 13
SHAPES = {  # rows, hidden size, rows of a block
    "one row": (1, 8, 16),
    "fewer rows than numbers in a state": (11, 16, 16),
    "as many": (16, 16, 16),
    "in blocks": (16, 16, 5),
    "more, of which some are kept": (24, 16, 6),
    "more, in one block": (24, 16, 40),
}
SETTINGS = {
    "sampled token": {},
    "everything": {"gather": True, "entropy": True, "bias": True, "softcap": 4.0, "temperature": True},
    "entropy": {"gather": True, "entropy": True},
    "own top-k": {"gather": True, "entropy": True, "bias": True, "top_k": 3},
}


def world(rows, size, dtype, skipping=False):
    g = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, size, generator=g, dtype=torch.float64).to(dtype) for n in (rows, V))
    bias = 0.3 * torch.randn(V, generator=g, dtype=torch.float64).to(dtype)
    token = torch.randint(0, V, (rows,), generator=g)
    ids = torch.randint(-1, V, (rows, K), generator=g)
    temperature, weight = 0.5 + torch.rand(rows, generator=g), torch.randn(rows, 3, generator=g, dtype=torch.float64)
    if skipping:
        token[::5] = -100  # ignored rows
        weight[1::3] = 0.0  # rows without a gradient
    return hidden, head, bias, token, ids, temperature, weight


def loss_of(leaves, tensors, settings, **cuts):
    *_, token, ids, temperature, weight = tensors
    hidden, head, bias = leaves
    out = trustrl.token_logprobs(
        hidden, head, token, gather_ids=ids if settings.get("gather") else None, entropy=settings.get("entropy", False),
        temperature=temperature if settings.get("temperature") else 0.7, bias=bias if settings.get("bias") else None,
        softcap=settings.get("softcap"), top_k=settings.get("top_k", 0), **cuts,
    )  # fmt: skip
    terms = [x for x in (out.logp, out.tail_logp, out.entropy) if x is not None]
    if out.topk is not None:
        terms[1] = terms[1] + out.topk.tail_logp + torch.where(out.topk.ids >= 0, out.topk.logp, 0.0).cos().sum(-1)
    return sum((weight[:, at] * x.double()).sum() for at, x in enumerate(terms))


def gradients(tensors, settings, **cuts):
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    loss_of(leaves, tensors, settings, **cuts).backward()
    return [x.grad for x in leaves if x.grad is not None]


@pytest.fixture
def recomputing(monkeypatch):
    """Switches the kept products off."""

    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(vocab_pass, "room_for", lambda *args: 0)
            return call()

    return run


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize("skipping", [False, True], ids=["all rows", "some rows"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kept_products_give_the_gradients_of_recomputed_ones(shape, settings, skipping, dtype, recomputing):
    rows, size, block = shape
    tensors, cuts = world(rows, size, dtype, skipping), {"block_rows": block, "block_vocab": TILE}
    kept = gradients(tensors, settings, **cuts)
    again = recomputing(lambda: gradients(tensors, settings, **cuts))
    exact = [*(x.double() for x in tensors[:3]), *tensors[3:]]
    truth = gradients(exact, settings, impl="reference")
    for k, a, t in zip(kept, again, truth, strict=True):
        step = ULP[dtype] * t.abs().max().clamp(min=1.0)
        assert (k.double() - a.double()).abs().max() <= step
        assert (k.double() - t).abs().max() <= (a.double() - t).abs().max() + step


@pytest.mark.parametrize("tile", [16, 32, 64])
def test_cells_that_leave_the_own_top_k_are_kept(tile):
    """Tiles of whole groups, which a CPU searches for the best cells instead of sorting them."""
    tensors = world(24, 16, torch.float64, skipping=True)
    settings = SETTINGS["own top-k"]
    truth = gradients(tensors, settings, impl="reference")
    for got, want in zip(gradients(tensors, settings, block_rows=9, block_vocab=tile), truth, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def flops(call):
    with FlopCounterMode(display=False) as mode:
        call()
    return mode.get_total_flops()


def test_three_products_and_less_where_rows_are_skipped():
    """Counted, not timed. Of 24 rows, 16 are kept, whatever the blocks."""
    settings = SETTINGS["entropy"]
    for rows, block, products in (
        (16, 16, 3.0),
        (11, 16, 3.0),
        (16, 5, 3.0),
        (24, 6, 3 + 8 / 24),
        (24, 40, 3 + 8 / 24),
        (64, 64, 3.75),
        (256, 64, 3.9375),
    ):
        tensors = world(rows, 16, torch.float32)
        count = flops(lambda t=tensors, b=block: gradients(t, settings, block_rows=b, block_vocab=TILE))
        assert count / (2 * rows * V * 16) == pytest.approx(products)
    own = flops(lambda: gradients(world(16, 16, torch.float32), SETTINGS["own top-k"], block_vocab=TILE))
    assert own / (2 * 16 * V * 16) == pytest.approx(3.0)
    *tensors, weight = world(16, 16, torch.float32)
    quarter = weight * (torch.arange(16) % 4 == 0).unsqueeze(-1)
    assert flops(lambda: gradients([*tensors, quarter], settings)) / (2 * 16 * V * 16) == pytest.approx(1 + 2 / 4)
    with as_on_an_accelerator():
        assert flops(lambda: gradients([*tensors, quarter], settings)) / (2 * 16 * V * 16) == pytest.approx(3)


class LargeTensors(TorchDispatchMode):
    """Number of tensors of the head's size that operations made."""

    made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() >= V * 64 and not func.is_view and func.name()[-1] != "_":
            self.made += out.data_ptr() not in {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
        return out


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("rows", [64, 40])
def test_one_buffer_of_the_heads_size_is_made_and_becomes_its_gradient(rows):
    tensors = world(rows, 64, torch.float32)
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    with LargeTensors() as large:
        loss = loss_of(leaves, tensors, {"entropy": True}, block_vocab=TILE)
        assert large.made == 1
        loss.backward()
    assert large.made == 1
    assert leaves[1].grad.untyped_storage().nbytes() == V * 64 * 4


@pytest.mark.parametrize("why", ["frozen head", "no gradient"])
def test_nothing_is_kept_where_nothing_is_saved(why):
    hidden, head, _, token, *_ = world(64, 64, torch.float32)
    head.requires_grad_(why != "frozen head")
    hidden.requires_grad_()
    with torch.set_grad_enabled(why != "no gradient"), LargestTensor() as largest:
        trustrl.token_logprobs(hidden, head, token, block_vocab=TILE)
    assert largest.elements < V * 64


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("settings", ["everything", "own top-k"])
def test_a_second_backward_pass_through_the_same_graph_gives_the_same_gradients(settings):
    tensors = world(24, 16, torch.float32, skipping=True)
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    loss = loss_of(leaves, tensors, SETTINGS[settings], block_rows=6, block_vocab=TILE)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    copies = [x.clone() for x in first]
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    third = torch.autograd.grad(2 * loss, leaves)
    for one, copy, two, three in zip(first, copies, second, third, strict=True):
        assert torch.equal(one, copy)  # not overwritten by the later passes
        assert torch.equal(one, two)
        assert torch.equal(2 * one, three)


def test_gradients_accumulate_over_micro_batches():
    tensors = world(16, 16, torch.float32)
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    losses = [loss_of(leaves, tensors, SETTINGS["entropy"], block_vocab=TILE) for _ in range(3)]  # three graphs at once
    for loss in losses:
        loss.backward()
    for leaf, once in zip(leaves, gradients(tensors, SETTINGS["entropy"], block_vocab=TILE), strict=False):
        torch.testing.assert_close(leaf.grad, 3 * once)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_keeps_no_buffer_between_the_passes(reentrant):
    tensors = world(16, 16, torch.float32)
    plain = gradients(tensors, SETTINGS["entropy"], block_vocab=TILE)
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]

    def loss(*given):
        return loss_of(given, tensors, SETTINGS["entropy"], block_vocab=TILE)

    kept = []
    real = chunked_pass.KeptLogits.tile

    def spied(self, columns, rows):
        kept.append(self.buffer.untyped_storage()._weak_ref())
        return real(self, columns, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_pass.KeptLogits, "tile", spied)
        value = checkpoint(loss, *leaves, use_reentrant=reentrant)
        # Reentrant checkpointing runs without a gradient first, so there was no buffer.
        assert all(torch.UntypedStorage._expired(ref) for ref in kept) if kept else reentrant
        value.backward()
    assert kept
    for leaf, want in zip(leaves, plain, strict=False):
        assert torch.equal(leaf.grad, want)


@pytest.mark.compiled
def test_a_compiled_model_recomputes_and_gives_the_same_gradients():
    tensors = world(16, 16, torch.float64)
    grads = []
    for call in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
        call(leaves, tensors, SETTINGS["entropy"], block_vocab=TILE).backward()
        grads.append([x.grad for x in leaves[:2]])
    for plain, compiled in zip(*grads, strict=True):
        torch.testing.assert_close(plain, compiled)


def test_bf16_products_fit_twice_as_many_rows_into_the_gradient_of_a_float32_head():
    hidden, head, _, token, *_ = world(32, 16, torch.float32)
    head.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        count = flops(lambda: trustrl.token_logprobs(hidden, head, token).logp.sum().backward())
    assert count / (2 * 32 * V * 16) == pytest.approx(2)  # hidden states without a gradient save a third product
    assert head.grad.dtype == torch.float32
    want = head.detach().double().requires_grad_()
    trustrl.token_logprobs(hidden.double(), want, token, impl="reference").logp.sum().backward()
    assert (head.grad - want.grad).abs().max() < 2e-2 * want.grad.abs().max()


def test_kept_products_do_not_wait_for_the_device():
    tensors = world(16, 16, torch.float32, skipping=True)
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    with counted() as counts:
        loss_of(leaves, tensors, SETTINGS["everything"], block_rows=5, block_vocab=TILE).backward()
    assert not counts.waits, str(counts)
    assert not counts.copies, str(counts)

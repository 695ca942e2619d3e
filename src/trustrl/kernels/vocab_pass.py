"""One pass over the vocabulary with a gradient, which recomputes the products or keeps them.

The pass that recomputes consists of two custom operators, so it is opaque to `torch.compile`: a compiled model keeps
one call instead of tracing every tile, and activation checkpointing repeats it like any other operator. The pass for a
trained head keeps the products for its backward pass, and is an autograd function (see `KeptLogits`).
"""
# torch leaves the registration methods of a custom operator untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trustrl.kernels import chunked_pass, devices
from trustrl.kernels.chunked_pass import ForwardResult, Gradients, KeptLogits, UpstreamGradients, room_for
from trustrl.kernels.derivatives import once_differentiable
from trustrl.kernels.pass_inputs import PassInputs


@torch.library.custom_op("trustrl::vocab_pass", mutates_args=())
def vocab_pass(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    counts: Tensor,
    live: Tensor,
    scale: Tensor,
    softcap: float | None,
    product_dtype: torch.dtype,
    block_rows: int,
    block_vocab: int,
    impl: str,
    top_k: int,
    slope: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the fields of `ForwardResult`, with zeros (−1 as an id) on rows that are not `live`.

    Those rows cost nothing on a CPU. An accelerator computes them like the others, because skipping them would wait for
    their number.
    """
    inputs = PassInputs(hidden, head, bias, ids, counts, scale, softcap, product_dtype, block_rows, block_vocab)
    if impl == "triton":  # it skips rows on the device
        with torch.autocast(hidden.device.type, enabled=False):
            return _forward(inputs, impl, top_k, slope, live)
    return forward_live(inputs, live, lambda some: _forward(some, impl, top_k, slope))


def forward_live(inputs: PassInputs, live: Tensor, run: Callable[[PassInputs], ForwardResult]) -> ForwardResult:
    """Returns the result of all rows, blank where a row is not `live`."""
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        if not devices.free_to_look(live):
            return _blanked(run(inputs), live)
        if bool(live.all()):
            return run(inputs)
        rows = live.nonzero().squeeze(-1)
        some = run(inputs.rows(rows))

    def back(x: Tensor, fill: int = 0) -> Tensor:
        return x.new_full((len(live), *x.shape[1:]), fill).index_copy_(0, rows, x)

    return ForwardResult(*map(back, some))._replace(best_ids=back(some.best_ids, -1))


def _blanked(result: ForwardResult, live: Tensor) -> ForwardResult:
    """Returns the result with zeros (−1 as an id) on rows that are not `live`."""

    def blank(x: Tensor, fill: int = 0) -> Tensor:
        rows = live.unsqueeze(-1) if x.ndim == 2 else live
        return torch.where(rows, x, fill) if x.numel() else x

    return ForwardResult(*map(blank, result))._replace(best_ids=blank(result.best_ids, -1))


def _forward(inputs: PassInputs, impl: str, top_k: int, slope: bool, live: Tensor | None = None) -> ForwardResult:
    if impl != "triton":
        return chunked_pass.forward(inputs, top_k, slope)
    from trustrl.kernels import triton_pass  # imported on use, because only this pass needs triton

    dtype = inputs.product_dtype
    out = triton_pass.forward(inputs.hidden.to(dtype), inputs.head.to(dtype), *inputs[2:7], live, top_k)
    return ForwardResult(*out, slope=out.known_NC.new_empty((len(out.known_NC), 0)))


@vocab_pass.register_fake
def _(
    hidden: Tensor, head: Tensor, bias: Tensor | None, ids: Tensor, counts: Tensor, live: Tensor, scale: Tensor,
    softcap: float | None, product_dtype: torch.dtype, block_rows: int, block_vocab: int, impl: str, top_k: int,
    slope: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, wide = ids.shape[0], torch.promote_types(product_dtype, torch.float32)
    return (
        hidden.new_empty((rows, ids.shape[1] + top_k), dtype=wide),
        ids.new_empty((rows, top_k), dtype=torch.int64),
        *(hidden.new_empty((rows,), dtype=wide) for _ in range(3)),
        hidden.new_empty((rows, hidden.shape[1] if slope else 0), dtype=wide),
    )


@torch.library.custom_op("trustrl::vocab_pass_backward", mutates_args=())
def vocab_pass_backward(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    counts: Tensor,
    scale: Tensor,
    softcap: float | None,
    product_dtype: torch.dtype,
    block_rows: int,
    block_vocab: int,
    impl: str,
    rest: Tensor,
    inner: Tensor,
    slope: Tensor,
    d_known: Tensor,
    d_rest: Tensor,
    d_inner: Tensor,
    wants_hidden: bool,
    wants_head: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of hidden, head and bias; an empty tensor for each one that is not wanted.

    Every product skips the rows whose coefficients are all exactly 0. On an accelerator, where skipping them would wait
    for their number, they take part in the products as zeros.
    """
    inputs = PassInputs(hidden, head, bias, ids, counts, scale, softcap, product_dtype, block_rows, block_vocab)
    upstream = UpstreamGradients(rest, inner, slope, d_known, d_rest, d_inner)
    wants = (wants_hidden, wants_head, wants_bias)
    if impl == "triton":
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = _backward_pass(inputs, upstream, impl, wants)
    else:
        gradients = gradients_alive(inputs, upstream, lambda some, its, _: _backward_pass(some, its, impl, wants))
    d_hidden, d_head, d_bias = (hidden.new_empty(0) if x is None else x for x in gradients)
    return d_hidden, d_head, d_bias


def gradients_alive(
    inputs: PassInputs,
    upstream: UpstreamGradients,
    run: Callable[[PassInputs, UpstreamGradients, Tensor | None], Gradients],
) -> Gradients:
    """Returns the gradients from the rows with a coefficient. `run` receives these rows, or None for all of them."""
    alive = (upstream.d_known != 0).any(-1) | (upstream.d_rest != 0) | (upstream.d_inner != 0)
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        if not devices.free_to_look(alive):
            part, d_head, d_bias = run(*_only_alive(inputs, upstream, alive), None)
            return None if part is None else torch.where(alive.unsqueeze(-1), part, 0.0), d_head, d_bias
        if bool(alive.all()):
            return run(inputs, upstream, None)
        rows = alive.nonzero().squeeze(-1)
        # An empty slope has nothing to index.
        some = UpstreamGradients(*(x[rows] if x.numel() else x for x in upstream))
        part, d_head, d_bias = run(inputs.rows(rows), some, rows)
        d_hidden = None if part is None else torch.zeros_like(inputs.hidden).index_copy_(0, rows, part)
        return d_hidden, d_head, d_bias


def _only_alive(inputs: PassInputs, upstream: UpstreamGradients, alive: Tensor) -> tuple[PassInputs, UpstreamGradients]:
    """Returns the inputs without the hidden states of other rows, whose NaN would survive a product with 0.

    A rest of −inf has no gradient, so none of their logits has one.
    """
    hidden = torch.where(alive.unsqueeze(-1), inputs.hidden, 0.0)
    return inputs._replace(hidden=hidden), upstream._replace(rest=torch.where(alive, upstream.rest, -torch.inf))


def _backward_pass(
    inputs: PassInputs, upstream: UpstreamGradients, impl: str, wants: tuple[bool, bool, bool]
) -> Gradients:
    if impl != "triton":
        return chunked_pass.backward(inputs, upstream, wants)
    from trustrl.kernels import triton_pass

    rest, inner, _, d_known, d_rest, d_inner = upstream
    hidden, head = inputs.hidden.to(inputs.product_dtype), inputs.head.to(inputs.product_dtype)
    gradients = triton_pass.backward(hidden, head, *inputs[2:7], rest, inner, d_known, d_rest, d_inner, wants)
    d_hidden, d_head, d_bias = (
        None if x is None or like is None else x.to(like.dtype) for x, like in zip(gradients, inputs[:3], strict=True)
    )
    return d_hidden, d_head, d_bias


@vocab_pass_backward.register_fake
def _(
    hidden: Tensor, head: Tensor, bias: Tensor | None, ids: Tensor, counts: Tensor, scale: Tensor,
    softcap: float | None, product_dtype: torch.dtype, block_rows: int, block_vocab: int, impl: str,
    rest: Tensor, inner: Tensor, slope: Tensor, d_known: Tensor, d_rest: Tensor, d_inner: Tensor,
    wants_hidden: bool, wants_head: bool, wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # Results of an operator must not share memory, hence the clones.
    nothing = hidden.new_empty(0)
    return (
        torch.empty_like(hidden) if wants_hidden else nothing,
        torch.empty_like(head) if wants_head else nothing.clone(),
        torch.empty_like(bias) if wants_bias and bias is not None else nothing.clone(),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, head, bias, ids, counts, _, scale, *settings, _, _ = inputs
    known, best_ids, rest, inner, largest, slope = output
    ctx.mark_non_differentiable(best_ids, largest, slope)
    # None tells that the loss does not read an output, which a gradient of zeros would not.
    ctx.set_materialize_grads(False)
    ids, counts = _with_best(ids, counts, best_ids)
    ctx.save_for_backward(hidden, head, bias, ids, counts, scale, rest, inner, slope)
    ctx.settings, ctx.num_cells = settings, known.shape[1]


def _with_best(ids: Tensor, counts: Tensor, best_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (ids, counts) with the best ids as further given ids, which they are for the backward pass."""
    if not best_ids.shape[1]:
        return ids, counts
    return torch.cat([ids, best_ids.clamp(min=0)], dim=-1), torch.cat([counts, best_ids >= 0], dim=-1)


def _upstream(
    rest: Tensor, inner: Tensor, slope: Tensor, num_cells: int, gradients: tuple[Tensor | None, ...]
) -> UpstreamGradients:
    """Returns results and gradients in the form of the backward pass: zeros for an output that the loss does not read.

    `gradients` are those of the fields of `ForwardResult`.
    """
    d_known, _, d_rest, d_inner, *_ = gradients
    d_known = rest.new_zeros((len(rest), num_cells)) if d_known is None else d_known
    d_rest, d_inner = (torch.zeros_like(rest) if x is None else x for x in (d_rest, d_inner))
    return UpstreamGradients(rest, inner, slope, d_known, d_rest, d_inner)


def _backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, head, bias, ids, counts, scale, rest, inner, slope = ctx.saved_tensors
    upstream = _upstream(rest, inner, slope, ctx.num_cells, grad_outputs)
    if grad_outputs[3] is not None and slope.numel():
        raise RuntimeError(
            "The entropy was computed without a gradient, but the loss differentiates it. Pass entropy=True."
        )
    wants = ctx.needs_input_grad[:3]
    gradients = vocab_pass_backward(hidden, head, bias, ids, counts, scale, *ctx.settings, *upstream, *wants)
    return tuple(x if wanted else None for x, wanted in zip(gradients, wants, strict=True)) + (None,) * 11


vocab_pass.register_autograd(_backward, setup_context=_setup)


def run_pass(inputs: PassInputs, live: Tensor, impl: str, top_k: int, slope: bool) -> ForwardResult:
    """Returns the result of one pass, with a gradient. Keeps the products if that saves a product and costs no memory.

    That is: the chunked pass and a head with a gradient. Code that `torch.compile` traces recomputes, because it could
    run its backward pass twice.
    """
    num_rows = room_for(inputs.hidden, inputs.head, inputs.product_dtype, inputs.block_rows)
    if (
        num_rows == 0
        or impl != "chunked"
        or not (inputs.head.requires_grad and torch.is_grad_enabled())
        or torch.compiler.is_compiling()
    ):
        return ForwardResult(*vocab_pass(*inputs[:5], live, *inputs[5:], impl, top_k, slope))
    function: Any = _KeepingPass
    return ForwardResult(*function.apply(*inputs[:3], inputs, live, num_rows, top_k))


class _KeepingPass(torch.autograd.Function):
    """One pass whose backward pass reads the products of the forward pass, once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        inputs: PassInputs,
        live: Tensor,
        num_rows: int,
        top_k: int,
    ) -> tuple[Tensor, ...]:
        inputs = inputs._replace(hidden=hidden, head=head, bias=bias)
        result, buffer = _kept_forward(inputs, live, num_rows, top_k)
        ids, counts = _with_best(inputs.ids, inputs.counts, result.best_ids)
        inputs = inputs._replace(ids=ids, counts=counts)
        # The buffer is saved like every tensor, so that activation checkpointing drops it and makes it again.
        ctx.save_for_backward(*inputs[:6], live, result.rest, result.inner, buffer)
        ctx.settings, ctx.num_rows, ctx.num_cells = inputs[6:], num_rows, result.known.shape[1]
        ctx.overwritten = False
        ctx.mark_non_differentiable(result.best_ids, result.largest, result.slope)
        ctx.set_materialize_grads(False)
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *tensors, live, rest, inner, buffer = ctx.saved_tensors
        inputs, wants = PassInputs(*tensors, *ctx.settings), ctx.needs_input_grad[:3]
        upstream = _upstream(rest, inner, rest.new_empty((len(rest), 0)), ctx.num_cells, grads)
        if ctx.overwritten:  # by an earlier backward pass through the same graph
            _, buffer = _kept_forward(inputs, live, ctx.num_rows, 0)
        ctx.overwritten = True
        # `data`, because autograd refuses a second backward pass if a saved tensor has changed.
        kept = KeptLogits(buffer.data, ctx.num_rows, inputs.product_dtype)
        del buffer

        def run(some: PassInputs, its: UpstreamGradients, rows: Tensor | None) -> Gradients:
            return chunked_pass.backward(some, its, wants, _chosen(kept, live, rows))

        return *gradients_alive(inputs, upstream, run), None, None, None, None


def _kept_forward(inputs: PassInputs, live: Tensor, num_rows: int, top_k: int) -> tuple[ForwardResult, Tensor]:
    """Returns the result of the forward pass, and the buffer of the head's gradient with the products in it."""
    buffer = torch.empty(inputs.head.shape, dtype=inputs.head.dtype, device=inputs.head.device)
    kept = KeptLogits(buffer, num_rows, inputs.product_dtype)
    return forward_live(inputs, live, lambda some: chunked_pass.forward(some, top_k, False, kept)), buffer


def _chosen(kept: KeptLogits, live: Tensor, rows: Tensor | None) -> KeptLogits:
    """Returns the kept products of some rows. A CPU, which alone chooses rows, kept those of live rows."""
    return kept if rows is None else kept._replace(chosen=(live.cumsum(0) - 1)[rows])

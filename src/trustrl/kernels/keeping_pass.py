"""The pass over the vocabulary for a trained head, with the products kept for the backward pass (see `kept_logits`)."""

from typing import Any

import torch
from torch import Tensor

from trustrl.kernels import chunked_pass
from trustrl.kernels.chunked_pass import ForwardResult, Gradients, UpstreamGradients
from trustrl.kernels.derivatives import once_differentiable
from trustrl.kernels.kept_logits import KeptLogits, room_for
from trustrl.kernels.pass_inputs import PassInputs
from trustrl.kernels.vocab_pass_op import forward_live, gradients_alive, vocab_pass


def run_pass(inputs: PassInputs, live: Tensor, impl: str, top_k: int, slope: bool) -> ForwardResult:
    """Returns the result of one pass, with a gradient. Keeps the products if that saves a product and costs no memory.

    That is: the chunked pass, a head with a gradient, no `top_k`, and at least one block of rows that fits into the
    head's gradient. Code that `torch.compile` traces recomputes, because it could run its backward pass twice.
    """
    num_rows = room_for(inputs.hidden, inputs.head, inputs.product_dtype, inputs.block_rows)
    if (
        num_rows == 0
        or impl != "chunked"
        or top_k
        or not (inputs.head.requires_grad and torch.is_grad_enabled())
        or torch.compiler.is_compiling()
    ):
        return ForwardResult(*vocab_pass(*inputs[:5], live, *inputs[5:], impl, top_k, slope))
    function: Any = _KeepingPass
    return ForwardResult(*function.apply(*inputs[:3], inputs, live, num_rows))


class _KeepingPass(torch.autograd.Function):
    """One pass whose backward pass reads the products of the forward pass, once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, inputs: PassInputs, live: Tensor, num_rows: int
    ) -> tuple[Tensor, ...]:
        inputs = inputs._replace(hidden=hidden, head=head, bias=bias)
        result, buffer = _kept_forward(inputs, live, num_rows)
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
        d_known, _, d_rest, d_inner, *_ = grads
        upstream = UpstreamGradients(
            rest,
            inner,
            rest.new_empty((len(rest), 0)),
            rest.new_zeros((len(rest), ctx.num_cells)) if d_known is None else d_known,
            torch.zeros_like(rest) if d_rest is None else d_rest,
            torch.zeros_like(rest) if d_inner is None else d_inner,
        )
        if ctx.overwritten:  # by an earlier backward pass through the same graph
            _, buffer = _kept_forward(inputs, live, ctx.num_rows)
        ctx.overwritten = True
        # `data`, because autograd refuses a second backward pass if a saved tensor has changed.
        kept = KeptLogits(buffer.data, ctx.num_rows, inputs.product_dtype)
        del buffer

        def run(some: PassInputs, its: UpstreamGradients, rows: Tensor | None) -> Gradients:
            return chunked_pass.backward(some, its, wants, _chosen(kept, live, rows))

        return *gradients_alive(inputs, upstream, run), None, None, None


def _kept_forward(inputs: PassInputs, live: Tensor, num_rows: int) -> tuple[ForwardResult, Tensor]:
    """Returns the result of the forward pass, and the buffer of the head's gradient with the products in it."""
    buffer = torch.empty(inputs.head.shape, dtype=inputs.head.dtype, device=inputs.head.device)
    kept = KeptLogits(buffer, num_rows, inputs.product_dtype)
    return forward_live(inputs, live, lambda some: chunked_pass.forward(some, 0, False, kept)), buffer


def _chosen(kept: KeptLogits, live: Tensor, rows: Tensor | None) -> KeptLogits:
    """Returns the kept products of some rows. A CPU, which alone chooses rows, kept those of live rows."""
    return kept if rows is None else kept._replace(chosen=(live.cumsum(0) - 1)[rows])

r"""Loss whose gradients are computed in the forward pass: three products instead of four, for more memory.

If the loss of a block of rows is known before the next block starts, its logits need not be recomputed. This requires
a loss that is a sum over blocks of rows, and one block of logits in memory, `block_rows × V`. Liger's losses make the
same trade. `token_logprobs` does not: a region may need the whole batch (sequences, metrics) before it knows a
coefficient, and `token_logprobs` skips rows whose coefficients are 0.

docs/vocabulary-cost.md compares it with the recomputing pass: it pays off in float32, where a product costs ten times
as much as in bf16. It hardly does in bf16, where accumulating the head's gradient once per block dominates.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from trustrl.kernels.chunked_pass import UpstreamGradients, gradient_tile, tile_coefficients
from trustrl.kernels.id_columns import GivenIds, given_ids
from trustrl.kernels.logprob_outputs import LogitSummary, TokenLogprobs, assembled_logprobs, wide_dtype
from trustrl.kernels.pass_inputs import CellIndex, PassInputs, given_logits, slices
from trustrl.kernels.running_state import RunningSums

BlockLoss = Callable[[TokenLogprobs, slice], Tensor]
"""Callable (outputs of some rows, slice of those rows) → their part of the loss."""


def loss_in_forward(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    token_ids_N: Int[Tensor, " N"],
    loss: BlockLoss,
    *,
    gather_ids: Int[Tensor, "N K"] | None = None,
    entropy: bool = False,
    temperature: float = 1.0,
    block_rows: int = 256,
    block_vocab: int = 4096,
) -> Float[Tensor, ""]:
    """Returns Σ loss(outputs of a block, its rows), differentiable in hidden states and head.

    Example:
        >>> hidden, head = torch.eye(2).requires_grad_(), torch.eye(2)
        >>> loss_in_forward(hidden, head, torch.tensor([0, 1]), lambda out, rows: -out.logp.sum()).backward()
        >>> hidden.grad
        tensor([[-0.2689,  0.2689],
                [ 0.2689, -0.2689]])
    """
    scale_N = torch.full(token_ids_N.shape, 1 / temperature, dtype=wide_dtype(hidden_ND), device=hidden_ND.device)
    given = given_ids(token_ids_N, gather_ids)
    inputs = PassInputs(
        hidden_ND, head_VD, None, given.ids_NC, given.counts_NC, scale_N, None, hidden_ND.dtype, block_rows, block_vocab
    )
    return _LossInForward.apply(hidden_ND, head_VD, inputs, given, gather_ids, entropy, loss)


class _LossInForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        inputs: PassInputs,
        given: GivenIds,
        gather_ids: Tensor | None,
        entropy: bool,
        loss: BlockLoss,
    ) -> Tensor:
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        inputs = inputs._replace(hidden=hidden.detach(), head=head.detach())
        rows = slices(len(hidden), inputs.block_rows)
        d_hidden = torch.zeros(hidden.shape, dtype=inputs.wide, device=hidden.device) if wants_hidden else None
        # Several blocks accumulate the head's gradient in float32, which is rounded once.
        dtype = inputs.wide if len(rows) > 1 else head.dtype
        d_head = torch.empty(head.shape, dtype=dtype, device=head.device) if wants_head else None
        logits = hidden.new_empty((len(head), min(inputs.block_rows, len(hidden))))
        total = torch.zeros((), dtype=inputs.wide, device=hidden.device)
        for at in rows:
            block, room = inputs.rows(at), logits.view(-1)[: len(head) * (at.stop - at.start)].view(len(head), -1)
            where = CellIndex(block)
            known = _stream(block, room, where)
            some = GivenIds(*(x[at] for x in given))
            ids = None if gather_ids is None else gather_ids[at]
            value, upstream = _block_loss(known, some, ids, entropy, loss, at)
            total += value
            part = None if d_hidden is None else d_hidden[at]
            _multiply(block, upstream, room, where, part, d_head, first=at is rows[0])
        ctx.save_for_backward(
            None if d_hidden is None else d_hidden.to(hidden.dtype), None if d_head is None else d_head.to(head.dtype)
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        d_hidden, d_head = ctx.saved_tensors
        if float(grads[0]) != 1.0:  # the common case of 1 avoids a second copy of the head's gradient
            d_hidden, d_head = (None if x is None else x * grads[0].to(x.dtype) for x in (d_hidden, d_head))
        return d_hidden, d_head, None, None, None, None, None


def _stream(block: PassInputs, logits: Tensor, where: CellIndex) -> tuple[Tensor, Tensor, Tensor]:
    """Fills `logits` with the block's products. Returns (given logits, log-sum-exp and entropy of the rest)."""
    running = RunningSums(block, slope=False, vocab_axis=0)
    for tile, columns in enumerate(slices(len(block.head), block.block_vocab)):
        torch.mm(block.head[columns], block.hidden.T, out=logits[columns])
        where.mark(tile, logits[columns], tokens_last=True)
        running.add(logits[columns], None, block.large)
    rest, inner, _, _ = running.results()
    return given_logits(block), rest, inner


def _block_loss(
    known: tuple[Tensor, Tensor, Tensor],
    given: GivenIds,
    gather_ids: Tensor | None,
    entropy: bool,
    loss: BlockLoss,
    at: slice,
) -> tuple[Tensor, UpstreamGradients]:
    """Returns the caller's loss of the block, and its gradient with respect to the cells and the rest."""
    with torch.enable_grad():
        logits, rest, inner = leaves = [x.detach().requires_grad_() for x in known]
        nothing = logits[:, :0].detach()
        unknown = torch.full_like(rest, torch.nan)
        summary = LogitSummary(logits, nothing.long(), nothing, rest, inner, unknown, unknown)
        out = assembled_logprobs(given, summary, gather_ids, 0, entropy)._replace(logp_error=None)
        value = loss(out, at)
        found = torch.autograd.grad(value, leaves, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return value.detach(), UpstreamGradients(rest.detach(), inner.detach(), nothing, *grads)


def _multiply(
    block: PassInputs,
    upstream: UpstreamGradients,
    logits: Tensor,
    where: CellIndex,
    d_hidden: Tensor | None,
    d_head: Tensor | None,
    first: bool,
) -> None:
    """Replaces the products by their gradients in place and accumulates the products with hidden states and head."""
    numbers = tile_coefficients(block, upstream)
    for at, columns in enumerate(slices(len(block.head), block.block_vocab)):
        tile = logits[columns]
        gradient_tile(block, numbers, tile, tile, at, columns, where, tokens_last=True)
        if d_hidden is not None:
            d_hidden += tile.T @ block.head[columns]
        if d_head is None:
            continue
        if d_head.dtype != tile.dtype:
            part = tile @ block.hidden
            d_head[columns] = part if first else d_head[columns] + part
        elif first:
            torch.mm(tile, block.hidden, out=d_head[columns])
        else:
            d_head[columns].addmm_(tile, block.hidden)

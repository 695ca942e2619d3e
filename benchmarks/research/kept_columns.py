"""Forward stream of a compacted pass: selects the columns that each block of rows keeps and sums the dropped ones.

Shape suffixes: N tokens, D hidden size, V vocabulary, C columns of a tile, B blocks of rows.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trustrl.kernels import tile_math
from trustrl.kernels.pass_inputs import CellIndex, PassInputs, slices
from trustrl.kernels.running_state import SAFE_EXPONENT

KEEP_STEP = 128
"""The number of kept columns of a tile is rounded up to a multiple of this, so that products have few shapes. A bf16
product on a CPU spends milliseconds on each new shape."""


class RowBlock(NamedTuple):
    """One block of rows, the index of its cells, and the columns it keeps of each tile."""

    rows: slice
    cells: CellIndex
    kept: list[Tensor]


def streamed_panel(
    inputs: PassInputs, known_NC: Tensor, drop_below: float, panel: list[RowBlock]
) -> tuple[Tensor, ...]:
    """Streams the vocabulary for a panel of blocks of equal size and fills their `RowBlock.kept`.

    Returns:
        (rest, inner, largest, m, −Σ q log q, s), see `research.gradient_error.Dropped` for m, q and s.
    """
    whole, rows = slice(panel[0].rows.start, panel[-1].rows.stop), panel[0].rows.stop - panel[0].rows.start
    inputs, known_NC = inputs.rows(whole), known_NC[whole]
    bound = shift = torch.logsumexp(known_NC.masked_fill(~inputs.counts, -torch.inf), -1)
    sums, largest = bound.new_zeros(4, len(bound)), torch.zeros_like(bound)
    shape_BV = bound.new_empty((len(panel), len(inputs.head)))
    scale, step = inputs.scale.unsqueeze(-1), KEEP_STEP if inputs.large else 1
    room = inputs.hidden.new_empty(len(bound) * min(inputs.block_vocab, len(inputs.head)))
    for tile, columns in enumerate(slices(len(inputs.head), inputs.block_vocab)):
        head = inputs.head[columns]
        product = room[: len(bound) * len(head)].view(len(bound), len(head))
        torch.mm(inputs.hidden, head.T, out=product)
        for block, its_rows in zip(panel, product.split(rows), strict=True):
            block.cells.mark(tile, its_rows)
        lower = torch.logaddexp(bound, shift + torch.log(sums[0]))
        top_BC = _fused_column_tops(product, scale, lower.unsqueeze(-1), rows, large=inputs.large)
        dropped_BC = torch.ones_like(top_BC)
        for block, top, dropped in zip(panel, top_BC, dropped_BC, strict=True):
            block.kept.append(kept_columns(top, drop_below, step))
            dropped[block.kept[-1]] = 0.0
        shape_BV[:, columns] = torch.where(dropped_BC > 0, top_BC.exp(), 0.0)
        if bool((top_BC.amax() + lower - shift > SAFE_EXPONENT).any()):
            highest = (product.to(inputs.wide) * scale).amax(-1)
            sums, shift = _moved(sums, shift, torch.maximum(shift, highest))
        size, *new = _fused_summary(product, scale, shift.unsqueeze(-1), dropped_BC, rows, large=inputs.large)
        sums += torch.stack(new)
        largest = torch.maximum(largest, size)
    empty = sums[0] == 0
    total = torch.where(empty, 1.0, sums[0])
    log_total = torch.log(total)
    _, moment, share, share_moment = sums / total
    shape_BV /= shape_BV.sum(-1, keepdim=True).clamp(min=torch.finfo(shape_BV.dtype).tiny)
    rest = torch.where(empty, -torch.inf, shift + log_total)
    return rest, log_total - moment, largest, share, share * log_total - share_moment, shape_BV


def kept_columns(top: Tensor, drop_below: float, step: int) -> Tensor:
    """Returns the columns above the threshold, plus the next most probable ones up to a multiple of `step`."""
    above = top > (math.log(drop_below) if drop_below > 0 else -math.inf)
    if step == 1:
        return above.nonzero().squeeze(-1)
    return torch.topk(top, min(-(-int(above.sum()) // step) * step, len(top)), sorted=False).indices


def _moved(sums: Tensor, shift: Tensor, higher: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Σ e and Σ e (z − shift), over all columns and over the dropped ones, converted to a higher shift."""
    moved, keep = shift - higher, torch.exp(shift - higher)
    total, moment, share, share_moment = sums
    return torch.stack([total, moment + moved * total, share, share_moment + moved * share]) * keep, higher


def _column_tops(product: Tensor, scale: Tensor, lower: Tensor, rows: int) -> Tensor:
    """Returns [B, C], the largest logit − `lower` of each column over the rows of a block."""
    z, _ = tile_math.logits(product, None, scale, None)
    return (z - lower).view(-1, rows, product.shape[1]).amax(1)


def _summary(product: Tensor, scale: Tensor, shift: Tensor, dropped_BC: Tensor, rows: int) -> tuple[Tensor, ...]:
    """Returns (largest |product|, Σ e, Σ e·x) as in `tile_math.summary`, and both sums over the dropped columns."""
    z, _ = tile_math.logits(product, None, scale, None)
    x = z - shift
    e = torch.exp(x)
    ex = torch.where(e > 0, e * x, 0.0)
    size = torch.where(product == -torch.inf, 0.0, product.abs().to(z.dtype))
    dropped = dropped_BC.unsqueeze(1).expand(-1, rows, -1).reshape(product.shape)
    return size.amax(-1), e.sum(-1), ex.sum(-1), (e * dropped).sum(-1), (ex * dropped).sum(-1)


_fused_column_tops, _fused_summary = tile_math.FusedFunction(_column_tops), tile_math.FusedFunction(_summary)

r"""Any device, plain torch: the vocabulary in tiles, the logits recomputed in the backward pass.

Replaces, without its [N, V] arrays,

    logits = cap(hidden @ head.T + bias) · scale
    known  = logits.gather(-1, ids)
    rest   = logits with −inf at the counted ids
    torch.logsumexp(rest, -1),  entropy of softmax(rest)

**Head repair.** The logits of the given ids are computed apart, as float32 dot products, and are left out of the tiles.
The rounding of a bf16 product is then left only in the rest: the error of a log-prob is at most (mass outside the ids)
× (largest rounding of a logit).

**Order.** The forward pass streams the vocabulary for a block of rows and keeps four numbers per row. The backward pass
takes the vocabulary as the outer loop, so that each tile of the head's gradient is written once; the hidden states'
gradient adds up in float32. When nobody differentiates the entropy, the gradient of `rest` in the hidden states is
made in the forward pass (`slope`), from the tile that is there anyway: with a frozen head nothing is recomputed.

Memory beside inputs, outputs and gradients: one tile of `block_rows × block_vocab` in the products' dtype (two with
`slope`), and one block of head rows for the given ids when uncompiled.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trustrl.kernels import tiles
from trustrl.kernels.streams import Best, Cells, Running
from trustrl.kernels.work import Pass, given_logits, slices, spread

BLOCK_ROWS, BLOCK_VOCAB = 1024, 4096


class Streamed(NamedTuple):
    """Results per row."""

    known: Tensor
    """[N, C + k], logits at the given ids and at those found."""
    found: Tensor
    """[N, k], the largest ids of the rest; −1 where the vocabulary ended."""
    rest: Tensor
    """[N], log-sum-exp of every other logit; −inf where there is none."""
    inner: Tensor
    """[N], entropy within the rest."""
    largest: Tensor
    """[N], largest |product| in the rest."""
    slope: Tensor
    """[N, D], ∂rest/∂hidden, or nothing."""


def forward(work: Pass, top_k: int, slope: bool) -> Streamed:
    """One pass over the vocabulary for every row."""
    num_rows = work.hidden.shape[0]
    whole: Streamed | None = None
    for rows in slices(num_rows, work.block_rows):
        block = _forward_block(work.rows(rows), top_k, slope)
        if len(block.rest) == num_rows:
            return block
        if whole is None:
            whole = Streamed(*(x.new_empty((num_rows, *x.shape[1:])) for x in block))
        for all_rows, some in zip(whole, block, strict=True):
            all_rows[rows] = some
    assert whole is not None  # there is always one block
    return whole


def _forward_block(work: Pass, top_k: int, slope: bool) -> Streamed:
    hidden = work.hidden.to(work.product_dtype)
    num_rows, size = hidden.shape[0], work.head.shape[0]
    cells = Cells(work)
    running = Running(work, slope)
    best = Best(num_rows, top_k, hidden)
    room = hidden.new_empty(num_rows * min(work.block_vocab, size) * (2 if slope else 1))
    for at, columns in enumerate(slices(size, work.block_vocab)):
        head = work.head[columns].to(work.product_dtype)
        bias = None if work.bias is None else work.bias[columns]
        product, weights = _carve(room, slope, num_rows, head.shape[0])
        torch.mm(hidden, head.T, out=product)
        cells.mark(at, product)
        if top_k:
            dropped, dropped_bias = best.take(product, bias, columns.start)
            running.add(dropped, dropped_bias, work, large=False)
            if slope:  # what is dropped from the best belongs to the rest, at head rows of its own
                running.add_slope_at(dropped, dropped_bias, best.dropped_ids, work)
        running.add(product, bias, work, work.large, weights, head)
    found = best.ids
    ids = torch.cat([work.ids, found.clamp(min=0)], dim=-1)
    return Streamed(given_logits(work._replace(ids=ids)), found, *running.results())


class Upstream(NamedTuple):
    """What the backward pass starts from, per row."""

    rest: Tensor
    inner: Tensor
    slope: Tensor
    d_known: Tensor
    """[N, C], the loss's gradient in `known`; its columns include the ids found."""
    d_rest: Tensor
    d_inner: Tensor


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def backward(work: Pass, upstream: Upstream, wants: tuple[bool, bool, bool]) -> Gradients:
    r"""Gradients in (hidden, head, bias), those that are wanted. `work.ids` includes the ids found.

    With q_j = exp(z_j − rest) and H the entropy within the rest:   ∂/∂z_j = q_j (d_rest − d_inner (log q_j + H))
    """
    slope, d_rest = upstream.slope, upstream.d_rest
    wants_hidden, wants_head, wants_bias = wants
    coefficients = tile_coefficients(work, upstream)
    d_hidden = streamed = None
    if wants_hidden and slope.numel():
        d_hidden = torch.empty_like(work.hidden)
        for at in slices(len(d_rest), work.block_rows):
            d_hidden[at] = slope[at] * d_rest[at].unsqueeze(-1) + spread(coefficients.on_cells[at], work.rows(at))
    elif wants_hidden:
        d_hidden = streamed = torch.zeros(work.hidden.shape, dtype=work.wide, device=work.hidden.device)
    d_head = torch.empty_like(work.head) if wants_head else None
    d_bias = torch.zeros_like(work.bias, dtype=work.wide) if wants_bias and work.bias is not None else None
    if streamed is not None or d_head is not None or d_bias is not None:
        _stream_backward(work, coefficients, streamed, d_head, d_bias)
    return (
        None if d_hidden is None else d_hidden.to(work.hidden.dtype),
        d_head,
        None if d_bias is None or work.bias is None else d_bias.to(work.bias.dtype),
    )


class Coefficients(NamedTuple):
    """Per-row numbers that turn a tile of products into the loss's gradient in them."""

    base: Tensor
    on_mass: Tensor
    on_log: Tensor
    on_cells: Tensor
    """[N, C], the gradient at the counted cells, 0 at the others."""

    def rows(self, at: slice) -> "Coefficients":
        """The same for some of the rows."""
        return Coefficients(*(x[at] for x in self))


def tile_coefficients(work: Pass, upstream: Upstream) -> Coefficients:
    """A row without a rest gets none of its gradient: q = exp(z − inf) = 0."""
    live = upstream.rest > -torch.inf
    return Coefficients(
        base=torch.where(live, upstream.rest, torch.inf),
        on_mass=torch.where(live, upstream.d_rest - upstream.d_inner * upstream.inner, 0.0),
        on_log=torch.where(live, upstream.d_inner, 0.0),
        on_cells=torch.where(work.counts, upstream.d_known * _known_slope(work), 0.0),
    )


def _stream_backward(
    work: Pass, coefficients: Coefficients, d_hidden: Tensor | None, d_head: Tensor | None, d_bias: Tensor | None
) -> None:
    """Recomputes each tile once and multiplies it into the gradients."""
    dtype, size = work.product_dtype, work.head.shape[0]
    rows = slices(work.hidden.shape[0], work.block_rows)
    blocks = [(work.rows(at), coefficients.rows(at)) for at in rows]
    cells = [Cells(block) for block, _ in blocks]
    states = [block.hidden.to(dtype) for block, _ in blocks]
    # The head's gradient wants the tokens as the inner axis of the product: twice as fast on a CPU.
    tokens_last = d_head is not None
    widest = min(work.block_vocab, size)
    room = states[0].new_empty(len(states[0]) * widest)
    # Parts of a narrow gradient add up in float32 and are rounded once.
    several = d_head is not None and len(blocks) > 1
    sums = torch.empty((widest, work.head.shape[1]), dtype=work.wide, device=work.head.device) if several else None
    for at, columns in enumerate(slices(size, work.block_vocab)):
        head = work.head[columns].to(dtype)
        for n, (block, numbers) in enumerate(blocks):
            hidden = states[n]
            shape = (len(head), len(hidden)) if tokens_last else (len(hidden), len(head))
            tile = room[: len(head) * len(hidden)].view(shape)
            torch.mm(*((head, hidden.T) if tokens_last else (hidden, head.T)), out=tile)
            cells[n].mark(at, tile, tokens_last)
            gradient_tile(block, numbers, tile, at, columns, cells[n], tokens_last)
            if d_hidden is not None:
                d_hidden[rows[n]] += (tile.T if tokens_last else tile) @ head
            if d_head is not None:
                _into_head(d_head[columns], sums, tile, hidden, n, len(blocks))
            if d_bias is not None:
                d_bias[columns] += tile.sum(-1 if tokens_last else 0, dtype=d_bias.dtype)


def gradient_tile(
    work: Pass, numbers: Coefficients, tile: Tensor, at: int, columns: slice, cells: Cells, tokens_last: bool
) -> None:
    """Replaces a marked tile of products by the loss's gradient in them, given ids included."""
    vocab_axis = 0 if tokens_last else -1
    scale, base, on_mass, on_log = (x.unsqueeze(vocab_axis) for x in (work.scale, *numbers[:3]))
    bias = None if work.bias is None else work.bias[columns].unsqueeze(-1 - vocab_axis)
    tiles.fused_gradient_in_place(tile, bias, scale, work.softcap, base, on_mass, on_log, large=work.large)
    row, cell, column = cells.within(at)
    where = (column, row) if tokens_last else (row, column)
    tile[where] = numbers.on_cells[row, cell].to(tile.dtype)


def _into_head(d_head: Tensor, sums: Tensor | None, tile: Tensor, hidden: Tensor, block: int, num_blocks: int) -> None:
    """Adds one block of rows to a tile of the head's gradient."""
    if sums is None:
        if d_head.dtype == tile.dtype:
            torch.mm(tile, hidden, out=d_head)
        else:
            d_head.copy_(tile @ hidden)
        return
    sums = sums[: len(d_head)]
    part = tile @ hidden
    sums = sums.copy_(part) if block == 0 else sums.add_(part)
    if block == num_blocks - 1:
        d_head.copy_(sums)


def _known_slope(work: Pass) -> Tensor:
    """∂logit/∂product at the given ids."""
    if work.softcap is None:
        return work.scale.unsqueeze(-1)
    bent = given_logits(work) / (work.softcap * work.scale.unsqueeze(-1))
    return (1 - bent.square()) * work.scale.unsqueeze(-1)


def _carve(room: Tensor, twice: bool, num_rows: int, width: int) -> tuple[Tensor, Tensor | None]:
    """One or two contiguous tiles from the room made for the largest."""
    size = num_rows * width
    return room[:size].view(num_rows, width), room[size : 2 * size].view(num_rows, width) if twice else None

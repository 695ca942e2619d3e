r"""A pass whose backward multiplies only the vocabulary columns that carry gradient. Opt-in: it is an approximation.

Values are those of the chunked pass. The backward pass sees, for each block b of rows, the columns that matter:

    kept_b = {j : p_nj > drop_below for some row n of b}
    dz_nj  = exact                                           where j is kept, or a given id of row n
           = (Σ of dz_n over its dropped columns) · s_bj     elsewhere

The threshold is known before the stream: the log-sum-exp of the given ids and of what has streamed so far is a lower
bound of the row's own, so p_nj ≤ exp(z_nj − bound). What is dropped is not lost: its sum is streamed exactly, and is
spread by one distribution per block, s_bj ∝ the bound of max_n p_nj. A head's rows have a large common part, so most of
the error goes away for the price of one more row per block; and every row of the head still gets a gradient.

Shape suffixes: N tokens, D hidden size, V vocabulary, K given ids, C columns of a tile, B blocks of rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from trustrl.kernels import cells, tiles
from trustrl.kernels.dropped import Dropped
from trustrl.kernels.keeping import Block, stream
from trustrl.kernels.outputs import TokenLogprobs, wide_dtype
from trustrl.kernels.streams import Cells
from trustrl.kernels.work import Pass, given_logits, slices, spread

PANEL_ROWS = 1024
"""Rows that stream at once: several blocks share a tile of products."""


def token_logprobs_compacted(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    token_ids_N: Int[Tensor, " N"],
    *,
    gather_ids: Int[Tensor, "N K"] | None = None,
    entropy: bool = False,
    temperature: float = 1.0,
    drop_below: float,
    block_rows: int = 256,
    block_vocab: int = 4096,
) -> tuple[TokenLogprobs, Dropped]:
    """`trustrl.token_logprobs` with a compacted backward pass, and what that leaves out.

    `trustrl.kernels.dropped.gradient_error_bound` turns the latter into a bound for a given loss.

    Args:
        hidden_ND: last hidden states, after the final norm.
        head_VD: the output embedding; a bias or a softcap is not supported.
        token_ids_N: the sampled tokens; ignored rows must be left out.
        gather_ids: ids to read; their gradient is always exact. The more mass they hold, the sharper the threshold.
        entropy: whether to return the entropy, with its gradient.
        temperature: divides the logits.
        drop_below: probability up to which a column of a block may be dropped; 0 gives the exact gradient.
        block_rows: tokens that share their kept columns; more tokens keep more columns but multiply faster.
        block_vocab: words per tile.

    Example:
        >>> hidden, head = torch.eye(2, requires_grad=True), torch.tensor([[9.0, 0.0], [0.0, 9.0], [0.0, 0.0]])
        >>> out, dropped = token_logprobs_compacted(hidden, head, torch.tensor([0, 1]), drop_below=0.01)
        >>> dropped.columns_kept_B, dropped.mass_N
        (tensor([0.]), tensor([0.0002, 0.0002]))
    """
    if not 0 <= drop_below < 1:
        raise ValueError(f"drop_below must be a probability in [0, 1), got {drop_below}. Use 0 for exact gradients.")
    if block_rows < 1 or block_vocab < 1:
        raise ValueError(f"block_rows and block_vocab must be 1 or more, got {block_rows} and {block_vocab}.")
    if bool((token_ids_N < 0).any()):
        raise ValueError("token_ids_N must be 0 or above, got ignored rows. Leave them out, or use token_logprobs.")
    dtype, wide = hidden_ND.dtype, wide_dtype(hidden_ND)
    scale_N = torch.full(token_ids_N.shape, 1 / temperature, dtype=wide, device=hidden_ND.device)
    given = cells.given_ids(token_ids_N, gather_ids)
    work = Pass(
        hidden_ND, head_VD, None, given.ids_NC, given.counts_NC, scale_N, None, dtype, block_rows, block_vocab
    )  # fmt: skip
    found = _CompactedPass.apply(hidden_ND, head_VD, work, drop_below)
    known_NC, rest_N, inner_N, largest_N, share_N, spread_N, shape_BV, kept_B = found  # type: ignore[misc]
    nothing = known_NC[:, :0].detach()
    known = cells.Known(
        given_NC=known_NC,
        found_ids_NF=nothing.long(),
        found_NF=nothing,
        rest_N=rest_N,
        inner_N=inner_N,
        rounding_N=torch.finfo(dtype).eps / 2 * largest_N * scale_N,
        own_rounding_N=torch.finfo(wide).eps * hidden_ND.shape[1] ** 0.5 * largest_N * scale_N,
    )
    out = cells.outputs(given, known, gather_ids, 0, entropy)
    mass_N = share_N * torch.exp(rest_N - out.logsumexp).detach()
    scale = 1 / temperature
    return out, Dropped(kept_B, mass_N, rest_N, inner_N, share_N, spread_N, shape_BV, drop_below, block_rows, scale)


class _CompactedPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, work: Pass, drop_below: float) -> tuple[Tensor, ...]:
        work = work._replace(hidden=hidden.detach(), head=head.detach())
        with torch.autocast(hidden.device.type, enabled=False):
            known = given_logits(work)
            blocks = [Block(at, Cells(work.rows(at)), []) for at in slices(len(hidden), work.block_rows)]
            ragged = len(hidden) % work.block_rows > 0  # a last block with fewer rows streams by itself
            step, even = max(PANEL_ROWS // work.block_rows, 1), blocks[:-1] if ragged else blocks
            panels = [even[at] for at in slices(len(even), step) if even] + ([blocks[-1:]] if ragged else [])
            parts = zip(*(stream(work, known, drop_below, panel) for panel in panels), strict=True)
            rest, inner, largest, share, moment, shape = map(torch.cat, parts)
        kept = rest.new_tensor([sum(map(len, block.kept)) for block in blocks]) / len(head)
        ctx.mark_non_differentiable(largest, share, moment, shape, kept)
        ctx.save_for_backward(hidden, head, rest, inner, share, moment, shape)
        ctx.work, ctx.blocks = work, blocks
        return known, rest, inner, largest, share, moment, shape, kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, head, *found = ctx.saved_tensors
        work = ctx.work._replace(hidden=hidden, head=head)
        with torch.autocast(hidden.device.type, enabled=False):
            return *_gradients(work, ctx.blocks, found, grads[:3], ctx.needs_input_grad[:2]), None, None


def _gradients(
    work: Pass, blocks: list[Block], found: list[Tensor], grads: tuple[Tensor, ...], wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients in (hidden, head): the vocabulary outside, so that a tile of the head's gradient is written once."""
    rest, inner, share, moment, shape_BV = found
    d_known, d_rest, d_inner = grads
    live = rest > -torch.inf
    on_mass, on_log = (torch.where(live, x, 0.0) for x in (d_rest - d_inner * inner, d_inner))
    on_dropped = work.scale * (on_mass * share + on_log * moment)
    per_row = torch.stack([work.scale, torch.where(live, rest, torch.inf), on_mass, on_log])
    d_cells = torch.where(work.counts, d_known * work.scale.unsqueeze(-1), 0.0)
    d_hidden = d_head = sums = dropped_BD = hidden_wide = None
    mean_BD = torch.zeros((len(blocks), work.hidden.shape[1]), dtype=work.wide, device=work.hidden.device)
    if wants[0]:
        d_hidden = spread(d_cells, work)
    if wants[1]:
        d_head, hidden_wide = torch.empty_like(work.head), work.hidden.to(work.wide)
        sums = mean_BD.new_empty((min(work.block_vocab, len(d_head)), mean_BD.shape[1]))
        dropped_BD = torch.stack([on_dropped[block.rows] @ hidden_wide[block.rows] for block in blocks])
    for tile, columns in enumerate(slices(len(work.head), work.block_vocab)):
        head, shape_BC = work.head[columns], shape_BV[:, columns]
        part = None if sums is None else sums[: len(head)]
        if part is not None and dropped_BD is not None:
            torch.mm(shape_BC.T, dropped_BD, out=part)
        if wants[0]:
            mean_BD += shape_BC.to(head.dtype) @ head
        for block in blocks:
            at = block.rows
            if part is not None and hidden_wide is not None:
                _add_cells(part, block.cells.within(tile), d_cells[at], hidden_wide[at])
            into = None if d_hidden is None else d_hidden[at]
            _multiply(work.hidden[at], head, block, tile, per_row[:, at], into, part, work.large)
        if d_head is not None and part is not None:
            d_head[columns] = part
    if d_hidden is not None:
        for block, mean in zip(blocks, mean_BD, strict=True):
            d_hidden[block.rows].addr_(on_dropped[block.rows], mean)
        d_hidden = d_hidden.to(work.hidden.dtype)
    return d_hidden, d_head


def _add_cells(sums_CD: Tensor, where: tuple[Tensor, Tensor, Tensor], d_cells: Tensor, hidden: Tensor) -> None:
    """The given ids' part of a tile of the head's gradient: Σ d · h over the cells of each column."""
    row, cell, column = where
    if len(row):
        found, counts = torch.unique_consecutive(column, return_counts=True)
        starts, weights = counts.cumsum(0) - counts, d_cells[row, cell]
        sums_CD[found] += F.embedding_bag(row, hidden, starts, mode="sum", per_sample_weights=weights)


def _multiply(
    hidden: Tensor,
    head: Tensor,
    block: Block,
    tile: int,
    per_row: Tensor,
    d_hidden: Tensor | None,
    sums_CD: Tensor | None,
    large: bool,
) -> None:
    """Recomputes the kept columns of a tile for a block of rows, and multiplies them into the gradients."""
    at = block.kept[tile]
    if not len(at):
        return
    few = head.index_select(0, at)
    # The head's gradient wants the tokens as the inner axis of the product: faster on a CPU.
    tokens_last = sums_CD is not None
    dz = few @ hidden.T if tokens_last else hidden @ few.T
    row, _, column = block.cells.within(tile)
    place = torch.full((len(head),), -1, device=at.device)
    place[at] = torch.arange(len(at), device=at.device)
    place = place[column]
    row, place = row[place >= 0], place[place >= 0]
    dz[(place, row) if tokens_last else (row, place)] = -torch.inf  # given ids are accounted for apart
    scale, *others = per_row.unsqueeze(1 if tokens_last else -1)
    tiles.fused_gradient_in_place(dz, None, scale, None, *others, large=large)
    if d_hidden is not None:
        d_hidden += (dz.T if tokens_last else dz) @ few
    if sums_CD is not None:
        sums_CD.index_add_(0, at, (dz @ hidden).to(sums_CD.dtype))

r"""Pass whose backward multiplies only the vocabulary columns that carry gradient. An approximation, for research.

The values equal those of the chunked pass. For each block b of rows, the backward pass keeps the columns that matter:

    kept_b = {j : p_nj > drop_below for some row n of b}
    dz_nj  = exact                                           where j is kept, or a given id of row n
           = (Σ of dz_n over its dropped columns) · s_bj     elsewhere

The pass can apply the threshold while it streams: the log-sum-exp of the given ids and of the columns streamed so far
is a lower bound of the row's log-sum-exp, so p_nj ≤ exp(z_nj − bound). The dropped gradient is not lost: its sum is
accumulated exactly and spread by one distribution per block, s_bj ∝ the bound of max_n p_nj. A head's rows have a large
common part, so this removes most of the error at the cost of one more row per block, and every row of the head still
gets a gradient.

Shape suffixes: N tokens, D hidden size, V vocabulary, K given ids, C columns of a tile, B blocks of rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from research.gradient_error import Dropped
from research.kept_columns import RowBlock, streamed_panel
from trustrl.kernels import tile_math
from trustrl.kernels.id_columns import given_ids
from trustrl.kernels.logprob_outputs import LogitSummary, TokenLogprobs, assembled_logprobs, wide_dtype
from trustrl.kernels.pass_inputs import CellIndex, PassInputs, given_logits, slices, weighted_head_rows

PANEL_ROWS = 1024
"""Number of rows that stream together: several blocks share a tile of products."""


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
    """Returns `trustrl.token_logprobs` with a compacted backward pass, and a record of the dropped columns.

    `research.gradient_error.gradient_error_bound` turns the record into an error bound for a given loss.

    Args:
        hidden_ND: Last hidden states, after the final norm.
        head_VD: Output embedding. A bias or a softcap is not supported.
        token_ids_N: Sampled tokens. Remove ignored rows first.
        gather_ids: Ids to read; their gradient is always exact. The more mass they hold, the sharper the threshold.
        entropy: True to return the entropy, with its gradient.
        temperature: Divides the logits.
        drop_below: Largest probability at which a block may drop a column; 0 gives the exact gradient.
        block_rows: Tokens that share their kept columns. More tokens keep more columns but multiply faster.
        block_vocab: Vocabulary ids per tile.

    Raises:
        ValueError: If a setting is out of range or a row is ignored.

    Example:
        >>> hidden, head = torch.eye(2, requires_grad=True), torch.tensor([[9.0, 0.0], [0.0, 9.0], [0.0, 0.0]])
        >>> out, dropped = token_logprobs_compacted(hidden, head, torch.tensor([0, 1]), drop_below=0.01)
        >>> dropped.columns_kept_B, dropped.mass_N
        (tensor([0.]), tensor([0.0002, 0.0002]))
    """
    if not 0 <= drop_below < 1:
        raise ValueError(f"drop_below must be a probability in [0, 1), got {drop_below}. Use 0 for exact gradients.")
    if block_rows < 1 or block_vocab < 1:
        raise ValueError(f"block_rows and block_vocab must be at least 1, got {block_rows} and {block_vocab}.")
    if bool((token_ids_N < 0).any()):
        raise ValueError("token_ids_N must be 0 or above, got ignored rows. Remove them, or use token_logprobs.")
    dtype, wide = hidden_ND.dtype, wide_dtype(hidden_ND)
    scale_N = torch.full(token_ids_N.shape, 1 / temperature, dtype=wide, device=hidden_ND.device)
    given = given_ids(token_ids_N, gather_ids)
    inputs = PassInputs(
        hidden_ND, head_VD, None, given.ids_NC, given.counts_NC, scale_N, None, dtype, block_rows, block_vocab
    )  # fmt: skip
    found = _CompactedPass.apply(hidden_ND, head_VD, inputs, drop_below)
    known_NC, rest_N, inner_N, largest_N, share_N, spread_N, shape_BV, kept_B = found
    nothing = known_NC[:, :0].detach()
    summary = LogitSummary(
        given_NC=known_NC,
        found_ids_NF=nothing.long(),
        found_NF=nothing,
        rest_N=rest_N,
        inner_N=inner_N,
        rounding_N=torch.finfo(dtype).eps / 2 * largest_N * scale_N,
        own_rounding_N=torch.finfo(wide).eps * hidden_ND.shape[1] ** 0.5 * largest_N * scale_N,
    )
    out = assembled_logprobs(given, summary, gather_ids, 0, entropy)
    mass_N = share_N * torch.exp(rest_N - out.logsumexp).detach()
    scale = 1 / temperature
    return out, Dropped(kept_B, mass_N, rest_N, inner_N, share_N, spread_N, shape_BV, drop_below, block_rows, scale)


class _CompactedPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, inputs: PassInputs, drop_below: float) -> tuple[Tensor, ...]:
        inputs = inputs._replace(hidden=hidden.detach(), head=head.detach())
        with torch.autocast(hidden.device.type, enabled=False):
            known = given_logits(inputs)
            blocks = [RowBlock(at, CellIndex(inputs.rows(at)), []) for at in slices(len(hidden), inputs.block_rows)]
            ragged = len(hidden) % inputs.block_rows > 0  # a last block with fewer rows streams alone
            step, even = max(PANEL_ROWS // inputs.block_rows, 1), blocks[:-1] if ragged else blocks
            panels = [even[at] for at in slices(len(even), step) if even] + ([blocks[-1:]] if ragged else [])
            parts = zip(*(streamed_panel(inputs, known, drop_below, panel) for panel in panels), strict=True)
            rest, inner, largest, share, moment, shape = map(torch.cat, parts)
        kept = rest.new_tensor([sum(map(len, block.kept)) for block in blocks]) / len(head)
        ctx.mark_non_differentiable(largest, share, moment, shape, kept)
        ctx.save_for_backward(hidden, head, rest, inner, share, moment, shape)
        ctx.inputs, ctx.blocks = inputs, blocks
        return known, rest, inner, largest, share, moment, shape, kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, head, *found = ctx.saved_tensors
        inputs = ctx.inputs._replace(hidden=hidden, head=head)
        with torch.autocast(hidden.device.type, enabled=False):
            return *_gradients(inputs, ctx.blocks, found, grads[:3], ctx.needs_input_grad[:2]), None, None


def _gradients(
    inputs: PassInputs, blocks: list[RowBlock], found: list[Tensor], grads: tuple[Tensor, ...], wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of (hidden, head). The outer loop is the vocabulary, so each head tile is written once."""
    rest, inner, share, moment, shape_BV = found
    d_known, d_rest, d_inner = grads
    live = rest > -torch.inf
    on_mass, on_log = (torch.where(live, x, 0.0) for x in (d_rest - d_inner * inner, d_inner))
    on_dropped = inputs.scale * (on_mass * share + on_log * moment)
    per_row = torch.stack([inputs.scale, torch.where(live, rest, torch.inf), on_mass, on_log])
    d_cells = torch.where(inputs.counts, d_known * inputs.scale.unsqueeze(-1), 0.0)
    d_hidden = d_head = sums = dropped_BD = hidden_wide = None
    mean_BD = torch.zeros((len(blocks), inputs.hidden.shape[1]), dtype=inputs.wide, device=inputs.hidden.device)
    if wants[0]:
        d_hidden = weighted_head_rows(d_cells, inputs)
    if wants[1]:
        d_head, hidden_wide = torch.empty_like(inputs.head), inputs.hidden.to(inputs.wide)
        sums = mean_BD.new_empty((min(inputs.block_vocab, len(d_head)), mean_BD.shape[1]))
        dropped_BD = torch.stack([on_dropped[block.rows] @ hidden_wide[block.rows] for block in blocks])
    for tile, columns in enumerate(slices(len(inputs.head), inputs.block_vocab)):
        head, shape_BC = inputs.head[columns], shape_BV[:, columns]
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
            _multiply(inputs.hidden[at], head, block, tile, per_row[:, at], into, part, inputs.large)
        if d_head is not None and part is not None:
            d_head[columns] = part
    if d_hidden is not None:
        for block, mean in zip(blocks, mean_BD, strict=True):
            d_hidden[block.rows].addr_(on_dropped[block.rows], mean)
        d_hidden = d_hidden.to(inputs.hidden.dtype)
    return d_hidden, d_head


def _add_cells(sums_CD: Tensor, where: tuple[Tensor, Tensor, Tensor], d_cells: Tensor, hidden: Tensor) -> None:
    """Adds the given ids' part to a tile of the head's gradient: Σ d · h over the cells of each column."""
    row, cell, column = where
    if len(row):
        found, counts = torch.unique_consecutive(column, return_counts=True)
        starts, weights = counts.cumsum(0) - counts, d_cells[row, cell]
        sums_CD[found] += F.embedding_bag(row, hidden, starts, mode="sum", per_sample_weights=weights)


def _multiply(
    hidden: Tensor,
    head: Tensor,
    block: RowBlock,
    tile: int,
    per_row: Tensor,
    d_hidden: Tensor | None,
    sums_CD: Tensor | None,
    large: bool,
) -> None:
    """Recomputes the kept columns of a tile for a block of rows and accumulates their products in the gradients."""
    at = block.kept[tile]
    if not len(at):
        return
    few = head.index_select(0, at)
    # The product for the head's gradient is faster on a CPU if tokens are the inner axis.
    tokens_last = sums_CD is not None
    dz = few @ hidden.T if tokens_last else hidden @ few.T
    row, _, column = block.cells.within(tile)
    place = torch.full((len(head),), -1, device=at.device)
    place[at] = torch.arange(len(at), device=at.device)
    place = place[column]
    row, place = row[place >= 0], place[place >= 0]
    dz[(place, row) if tokens_last else (row, place)] = -torch.inf  # given ids are computed separately
    scale, *others = per_row.unsqueeze(1 if tokens_last else -1)
    tile_math.fused_gradient(dz, None, scale, None, *others, dz, large=large)
    if d_hidden is not None:
        d_hidden += (dz.T if tokens_last else dz) @ few
    if sums_CD is not None:
        sums_CD.index_add_(0, at, (dz @ hidden).to(sums_CD.dtype))

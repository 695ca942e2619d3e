r"""The pass in plain torch, for any device. It tiles the vocabulary.

Replaces, without its [N, V] arrays,

    logits = cap(hidden @ head.T + bias) · scale
    known  = logits.gather(-1, ids)
    rest   = logits with −inf at the counted ids
    torch.logsumexp(rest, -1),  entropy of softmax(rest)

**Head repair.** The logits of the given ids are computed separately, as float32 dot products, and are excluded from the
tiles. Only the rest then suffers the rounding of a bf16 product: the error of a log-prob is at most (mass outside the
ids) × (largest rounding error of a logit).

**Loop order.** The forward pass streams the vocabulary for a block of rows and keeps four numbers per row. The backward
pass loops over the vocabulary on the outside, so it writes each tile of the head's gradient once; it accumulates the
hidden states' gradient in float32. If the entropy needs no gradient, the forward pass computes the gradient of `rest`
with respect to the hidden states (`slope`) from the tile it already holds. A frozen head then recomputes nothing. For a
trained head it can keep the products instead (see `KeptLogits`).

Memory in addition to inputs, outputs and gradients: one tile of `block_rows × block_vocab` in the products' dtype (two
with `slope`), and one block of head rows for the given ids if uncompiled. `devices` chooses and bounds both.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trustrl.kernels import devices, tile_math
from trustrl.kernels.pass_inputs import GivenCells, PassInputs, given_cells, given_logits, slices, weighted_head_rows
from trustrl.kernels.running_state import RunningSums, RunningTopK, add_product


class KeptLogits(NamedTuple):
    """Products kept from the forward pass in the buffer that becomes the head's gradient: three products, not four.

    A trained head's gradient needs a [V, D] buffer anyway. Until the backward pass writes to it, the buffer has room
    for the products of D rows (in the head's dtype). The backward pass takes the tiles from the last to the first: it
    reads a tile of products, writes the gradient with respect to them elsewhere, and overwrites the buffer with that
    tile of the head's gradient. Tiles are packed from the buffer's start, R ≤ D numbers for each id, so it overwrites
    products of this tile and of later ones only.

        products   | tile 0 | tile 1 | tile 2 |           |      tile t starts at R · (its first id)
        gradient   |  tile 0   |  tile 1   |  tile 2   |         tile t starts at D · (its first id)

    Rows beyond the buffer's room are recomputed. The products are marked: −inf at the given ids and at the best ids.
    """

    buffer: Tensor
    """[V, D], in the head's dtype."""
    num_rows: int
    dtype: torch.dtype
    """The products' dtype."""
    chosen: Tensor | None = None
    """[N], the kept row of each row of the pass. None if they are the same."""

    def blocks(self, num_rows: int, block_rows: int) -> tuple[list[slice], int]:
        """Returns blocks of rows, none of which mixes kept and recomputed rows, and the number of kept rows."""
        # Chosen rows ascend. Only a CPU chooses rows, and there reading is free.
        held = min(num_rows, self.num_rows) if self.chosen is None else int((self.chosen < self.num_rows).sum())
        kept = slices(held, block_rows)
        if held == num_rows:
            return kept, held
        return (kept if held else []) + slices(num_rows - held, block_rows, held), held

    def tile(self, columns: slice, rows: slice) -> Tensor:
        """Returns some rows of a tile: a view, or a copy if the rows were chosen."""
        flat = self.buffer.view(-1).view(self.dtype)[columns.start * self.num_rows : columns.stop * self.num_rows]
        whole = flat.view(self.num_rows, columns.stop - columns.start)
        return whole[rows] if self.chosen is None else whole.index_select(0, self.chosen[rows])

    def restore(self, rows: slice, block_vocab: int, ids_RK: Tensor, products_RK: Tensor) -> None:
        """Writes products back that left the top-k. A product of −inf changes nothing."""
        flat = self.buffer.view(-1).view(self.dtype)
        start_RK = ids_RK // block_vocab * block_vocab
        width_RK = (len(self.buffer) - start_RK).clamp(max=block_vocab)
        row_R1 = torch.arange(rows.start, rows.stop, device=ids_RK.device).unsqueeze(-1)
        place_RK = start_RK * self.num_rows + row_R1 * width_RK + ids_RK - start_RK
        # The maximum, because the cells hold −inf, and ids that displaced nothing repeat.
        flat.scatter_reduce_(0, place_RK.flatten(), products_RK.flatten(), "amax")


def room_for(hidden_ND: Tensor, head_VD: Tensor, product_dtype: torch.dtype, block_rows: int) -> int:
    """Returns the number of rows whose products are kept.

    All that fit into the head's gradient, if they are all rows or at least a quarter of a block on a CPU. Otherwise
    whole blocks: a further block runs every operation again, which costs an accelerator or a small model more.
    """
    num_rows, width = hidden_ND.shape
    fitting = width * head_VD.dtype.itemsize // product_dtype.itemsize
    if num_rows <= fitting:
        return num_rows
    pays_off = devices.free_to_look(hidden_ND) and 4 * fitting >= block_rows
    return fitting if pays_off else fitting // block_rows * block_rows


class ForwardResult(NamedTuple):
    """Results of the forward pass for each row."""

    known: Tensor
    """[N, C + k], logits at the given ids and at the best ids."""
    best_ids: Tensor
    """[N, k], ids of the largest logits that were not given; −1 pads a vocabulary with fewer than k."""
    rest: Tensor
    """[N], log-sum-exp of all other logits; −inf if no logit is left."""
    inner: Tensor
    """[N], entropy within the rest."""
    largest: Tensor
    """[N], largest |product| of the rest."""
    slope: Tensor
    """[N, D], ∂rest/∂hidden, or [N, 0] if it was not requested."""


def forward(inputs: PassInputs, top_k: int, slope: bool, kept: KeptLogits | None = None) -> ForwardResult:
    """Streams the vocabulary once for every block of rows and returns the results of all rows.

    If `kept` is given, also fills it with the marked products.
    """
    num_rows = inputs.hidden.shape[0]
    row_blocks, held = _row_blocks(inputs, kept)
    whole: ForwardResult | None = None
    for rows in row_blocks:
        block = _forward_block(inputs.rows(rows), top_k, slope, kept if rows.stop <= held else None, rows)
        if len(block.rest) == num_rows:
            return block
        if whole is None:
            whole = ForwardResult(*(x.new_empty((num_rows, *x.shape[1:])) for x in block))
        for all_rows, some in zip(whole, block, strict=True):
            all_rows[rows] = some
    assert whole is not None  # `slices` returns at least one block
    return whole


def _row_blocks(inputs: PassInputs, kept: KeptLogits | None) -> tuple[list[slice], int]:
    """Returns blocks of rows, and the number of rows at the start whose products are kept."""
    num_rows = inputs.hidden.shape[0]
    return (slices(num_rows, inputs.block_rows), 0) if kept is None else kept.blocks(num_rows, inputs.block_rows)


def _forward_block(inputs: PassInputs, top_k: int, slope: bool, kept: KeptLogits | None, rows: slice) -> ForwardResult:
    """Streams the vocabulary for one block. `inputs` are those of its `rows`, which index `kept`."""
    hidden = inputs.hidden.to(inputs.product_dtype)
    num_rows, size = hidden.shape[0], inputs.head.shape[0]
    cells = given_cells(inputs)
    running = RunningSums(inputs, slope)
    best = RunningTopK(num_rows, top_k, hidden)
    num_tiles = int(kept is None) + int(slope)
    # One buffer for all tiles, so that `mm` does not allocate one for each.
    room = hidden.new_empty(num_rows * min(inputs.block_vocab, size) * num_tiles)
    for tile_index, columns in enumerate(slices(size, inputs.block_vocab)):
        head = inputs.head[columns].to(inputs.product_dtype)
        bias = None if inputs.bias is None else inputs.bias[columns]
        product, weights = (
            _carve(room, slope, num_rows, head.shape[0]) if kept is None else (kept.tile(columns, rows), None)
        )
        torch.mm(hidden, head.T, out=product)
        # Given ids leave the tile before it is summed. Their logits are float32 dot products, below.
        cells.mark(tile_index, product)
        if top_k:
            dropped, dropped_bias = best.take(product, bias, columns.start)
            running.add(dropped, dropped_bias, large=False)
            if kept is not None:
                kept.restore(rows, inputs.block_vocab, best.dropped_ids, dropped)
            if slope:  # displaced cells go back to the rest; their head rows may lie anywhere
                running.add_slope_at(dropped, dropped_bias, best.dropped_ids)
        running.add(product, bias, inputs.large, weights, head)
    ids = torch.cat([inputs.ids, best.ids.clamp(min=0)], dim=-1)
    return ForwardResult(given_logits(inputs._replace(ids=ids)), best.ids, *running.results())


class UpstreamGradients(NamedTuple):
    """Saved forward results and upstream gradients of each row, which the backward pass starts from."""

    rest: Tensor
    inner: Tensor
    slope: Tensor
    d_known: Tensor
    """[N, C], gradient with respect to `known`; the columns include the best ids."""
    d_rest: Tensor
    d_inner: Tensor


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def backward(
    inputs: PassInputs, upstream: UpstreamGradients, wants: tuple[bool, bool, bool], kept: KeptLogits | None = None
) -> Gradients:
    r"""Returns the gradients of (hidden, head, bias), None where not wanted. `inputs.ids` includes the best ids.

    If `kept` is given, its products are not recomputed, and the head's gradient overwrites its buffer.

    With q_j = exp(z_j − rest) and H the entropy within the rest:   ∂/∂z_j = q_j (d_rest − d_inner (log q_j + H))
    """
    slope, d_rest = upstream.slope, upstream.d_rest
    wants_hidden, wants_head, wants_bias = wants
    coefficients = tile_coefficients(inputs, upstream)
    d_hidden = streamed = None
    # The forward pass has computed the slope, so a frozen head needs no second pass over the vocabulary.
    if wants_hidden and slope.numel():
        d_hidden = torch.empty_like(inputs.hidden)
        for rows in slices(len(d_rest), inputs.block_rows):
            d_hidden[rows] = slope[rows] * d_rest[rows].unsqueeze(-1) + weighted_head_rows(
                coefficients.on_cells[rows], inputs.rows(rows)
            )
    elif wants_hidden:
        d_hidden = streamed = torch.zeros(inputs.hidden.shape, dtype=inputs.wide, device=inputs.hidden.device)
    d_head = None
    if wants_head:
        d_head = torch.empty_like(inputs.head) if kept is None else kept.buffer
    d_bias = torch.zeros_like(inputs.bias, dtype=inputs.wide) if wants_bias and inputs.bias is not None else None
    if streamed is not None or d_head is not None or d_bias is not None:
        _stream_backward(inputs, coefficients, streamed, d_head, d_bias, kept)
    return (
        None if d_hidden is None else d_hidden.to(inputs.hidden.dtype),
        d_head,
        None if d_bias is None or inputs.bias is None else d_bias.to(inputs.bias.dtype),
    )


class TileCoefficients(NamedTuple):
    """Per-row coefficients that turn a tile of products into the gradient with respect to them."""

    base: Tensor
    on_mass: Tensor
    on_log: Tensor
    on_cells: Tensor
    """[N, C], the gradient at the counted cells; 0 elsewhere."""

    def rows(self, rows: slice) -> "TileCoefficients":
        """Returns the coefficients of some of the rows."""
        return TileCoefficients(*(x[rows] for x in self))


def tile_coefficients(inputs: PassInputs, upstream: UpstreamGradients) -> TileCoefficients:
    """Returns the coefficients. A row with an empty rest gets no gradient from it: q = exp(z − inf) = 0."""
    live = upstream.rest > -torch.inf
    return TileCoefficients(
        base=torch.where(live, upstream.rest, torch.inf),
        on_mass=torch.where(live, upstream.d_rest - upstream.d_inner * upstream.inner, 0.0),
        on_log=torch.where(live, upstream.d_inner, 0.0),
        on_cells=torch.where(inputs.counts, upstream.d_known * _known_slope(inputs), 0.0),
    )


def _stream_backward(
    inputs: PassInputs,
    coefficients: TileCoefficients,
    d_hidden: Tensor | None,
    d_head: Tensor | None,
    d_bias: Tensor | None,
    kept: KeptLogits | None,
) -> None:
    """Makes or reads each tile once and accumulates its products in the gradients, in place."""
    dtype, size = inputs.product_dtype, inputs.head.shape[0]
    row_blocks, held = _row_blocks(inputs, kept)
    blocks = [(inputs.rows(rows), coefficients.rows(rows)) for rows in row_blocks]
    cells = [given_cells(block) for block, _ in blocks]
    states = [block.hidden.to(dtype) for block, _ in blocks]
    widest, most_rows = min(inputs.block_vocab, size), max(map(len, states))
    room = states[0].new_empty(most_rows * widest)
    # Parts of a low-precision gradient are summed in float32 and rounded once.
    several = d_head is not None and len(blocks) > 1
    sums = (
        torch.empty((widest, inputs.head.shape[1]), dtype=inputs.wide, device=inputs.head.device) if several else None
    )
    # From the last tile to the first, because kept products are overwritten.
    for tile_index, columns in reversed(list(enumerate(slices(size, inputs.block_vocab)))):
        head = inputs.head[columns].to(dtype)
        for n, (block, numbers) in enumerate(blocks):
            hidden = states[n]
            # The product for the head's gradient is twice as fast on a CPU if tokens are the inner axis.
            is_kept = row_blocks[n].stop <= held
            tokens_last = d_head is not None and not is_kept
            shape = (len(head), len(hidden)) if tokens_last else (len(hidden), len(head))
            tile = room[: len(head) * len(hidden)].view(shape)
            product = tile
            if kept is not None and is_kept:
                product = kept.tile(columns, row_blocks[n])
            else:
                torch.mm(*((head, hidden.T) if tokens_last else (hidden, head.T)), out=tile)
                cells[n].mark(tile_index, tile, tokens_last)
            gradient_tile(block, numbers, product, tile, tile_index, columns, cells[n], tokens_last)
            by_token = tile.T if tokens_last else tile
            if d_hidden is not None:
                add_product(d_hidden[row_blocks[n]], by_token, head)
            if d_head is not None:
                _into_head(d_head[columns], sums, by_token.T, hidden, n, len(blocks))
            if d_bias is not None:
                d_bias[columns] += by_token.sum(0, dtype=d_bias.dtype)


def gradient_tile(
    inputs: PassInputs,
    numbers: TileCoefficients,
    product: Tensor,
    tile: Tensor,
    tile_index: int,
    columns: slice,
    cells: GivenCells,
    tokens_last: bool,
) -> None:
    """Writes the gradient with respect to a marked tile of products, including the given ids, to `tile`.

    `tile` may be the products themselves.
    """
    vocab_axis = 0 if tokens_last else -1
    scale, base, on_mass, on_log = (x.unsqueeze(vocab_axis) for x in (inputs.scale, *numbers[:3]))
    bias = None if inputs.bias is None else inputs.bias[columns].unsqueeze(-1 - vocab_axis)
    tile_math.fused_gradient(product, bias, scale, inputs.softcap, base, on_mass, on_log, tile, large=inputs.large)
    cells.put(tile_index, tile, numbers.on_cells, tokens_last)


def _into_head(d_head: Tensor, sums: Tensor | None, tile: Tensor, hidden: Tensor, block: int, num_blocks: int) -> None:
    """Adds the contribution of one block of rows to a tile of the head's gradient."""
    if sums is None:
        if d_head.dtype == tile.dtype:
            torch.mm(tile, hidden, out=d_head)
        else:
            d_head.copy_(tile @ hidden)
        return
    sums = sums[: len(d_head)]
    add_product(sums, tile, hidden, first=block == 0)
    if block == num_blocks - 1:
        d_head.copy_(sums)


def _known_slope(inputs: PassInputs) -> Tensor:
    """Returns ∂logit/∂product at the given ids."""
    if inputs.softcap is None:
        return inputs.scale.unsqueeze(-1)
    bent = given_logits(inputs) / (inputs.softcap * inputs.scale.unsqueeze(-1))
    return (1 - bent.square()) * inputs.scale.unsqueeze(-1)


def _carve(room: Tensor, twice: bool, num_rows: int, width: int) -> tuple[Tensor, Tensor | None]:
    """Returns one or two contiguous tiles, as views of a buffer made for the largest tile."""
    size = num_rows * width
    return room[:size].view(num_rows, width), room[size : 2 * size].view(num_rows, width) if twice else None

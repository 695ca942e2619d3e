"""The inputs of one pass over the vocabulary, and its given ids: their logits, and their places in each tile.

The logits of the given ids are computed separately. The pass writes −inf in their place before it sums a tile, and
their own gradient in place of the tile's.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trustrl.kernels import devices, tile_math


class PassInputs(NamedTuple):
    """Inputs and tile sizes of one pass over the vocabulary."""

    hidden: Tensor
    head: Tensor
    bias: Tensor | None
    ids: Tensor
    """[N, C], given ids, each within the vocabulary."""
    counts: Tensor
    """[N, C], True on the columns that are separate cells. No two of them in a row hold the same id."""
    scale: Tensor
    """[N], 1 / temperature."""
    softcap: float | None
    product_dtype: torch.dtype
    """The dtype of the products. Inputs are rounded to it first, because that is how the model defines its logits."""
    block_rows: int
    block_vocab: int

    def rows(self, rows: slice | Tensor) -> "PassInputs":
        """Returns the inputs of some of the rows."""
        return self._replace(
            hidden=self.hidden[rows], ids=self.ids[rows], counts=self.counts[rows], scale=self.scale[rows]
        )

    @property
    def large(self) -> bool:
        """True if the pass is large enough for compiled tiles to pay off."""
        return self.hidden.shape[0] * self.head.shape[0] >= tile_math.WORTH_COMPILING

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums and results."""
        return torch.promote_types(self.product_dtype, torch.float32)


def given_logits(inputs: PassInputs) -> Tensor:
    """Returns the logits at the given ids, as dot products in float32 or better."""
    hidden = inputs.hidden.to(inputs.product_dtype)
    raw = tile_math.fused_dots(hidden, inputs.head, inputs.ids, inputs.product_dtype, large=inputs.large)
    bias = None if inputs.bias is None else inputs.bias[inputs.ids]
    return tile_math.logits(raw, bias, inputs.scale.unsqueeze(-1), inputs.softcap)[0]


def weighted_head_rows(weights_NC: Tensor, inputs: PassInputs) -> Tensor:
    """Returns Σ_c weights[n, c] · head[ids[n, c]]."""
    if not inputs.ids.numel():
        return torch.zeros(inputs.hidden.shape, dtype=inputs.wide, device=inputs.hidden.device)
    weights_NC = weights_NC.to(inputs.head.dtype)
    # Sums while it gathers: the gathered rows alone would be [N, C, D].
    return F.embedding_bag(inputs.ids, inputs.head, per_sample_weights=weights_NC, mode="sum").to(inputs.wide)


def slices(size: int, step: int, first: int = 0) -> list[slice]:
    """Returns consecutive slices of at most `step` that start at `first`, or one empty slice if `size` is 0."""
    return [slice(first + start, first + min(start + step, size)) for start in range(0, max(size, 1), step)]


class CellIndex:
    """Index of the counted cells, sorted by id so that each tile finds its cells in one slice.

    Building it reads values: on an accelerator it would wait for the device.
    """

    def __init__(self, inputs: PassInputs) -> None:
        row, cell = inputs.counts.nonzero(as_tuple=True)
        self.column, order = inputs.ids[row, cell].sort()
        self.row, self.cell = row[order], cell[order]
        starts = [*range(0, inputs.head.shape[0], inputs.block_vocab), inputs.head.shape[0]]
        edges = torch.searchsorted(self.column, torch.tensor(starts, device=self.column.device))
        # torch leaves the elements of `tolist` untyped.
        self.edges: list[int] = edges.tolist()  # pyright: ignore[reportUnknownMemberType]
        self.block_vocab = inputs.block_vocab

    def within(self, tile: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (row, cell, column within the tile) of the cells in a tile."""
        span = slice(self.edges[tile], self.edges[tile + 1])
        return self.row[span], self.cell[span], self.column[span] - tile * self.block_vocab

    def mark(self, tile: int, product: Tensor, tokens_last: bool = False) -> None:
        """Writes −inf at the cells of a tile."""
        row, _, column = self.within(tile)
        product[(column, row) if tokens_last else (row, column)] = -torch.inf

    def put(self, tile: int, product: Tensor, values_NC: Tensor, tokens_last: bool = False) -> None:
        """Writes each cell's value into a tile that holds 0 there."""
        row, cell, column = self.within(tile)
        product[(column, row) if tokens_last else (row, column)] = values_NC[row, cell].to(product.dtype)


class ScatteredCells:
    """The same without reading a value: every given id is scattered into every tile, and has no effect outside its own.

    An id outside the tile falls on some column of its row. There it takes the minimum with +inf, or adds 0.
    """

    def __init__(self, inputs: PassInputs) -> None:
        self.column, self.block_vocab = inputs.ids % inputs.block_vocab, inputs.block_vocab
        self.tile = torch.where(inputs.counts, inputs.ids // inputs.block_vocab, -1)
        self.marked, self.untouched = (
            inputs.hidden.new_full((), x, dtype=inputs.product_dtype) for x in (-torch.inf, torch.inf)
        )

    def mark(self, tile: int, product: Tensor, tokens_last: bool = False) -> None:
        """Writes −inf at the cells of a tile."""
        marks = torch.where(self.tile == tile, self.marked, self.untouched)
        columns, marks = self._placed(product, marks, tokens_last)
        product.scatter_reduce_(0 if tokens_last else -1, columns, marks, "amin")

    def put(self, tile: int, product: Tensor, values_NC: Tensor, tokens_last: bool = False) -> None:
        """Writes each cell's value into a tile that holds 0 there."""
        values = torch.where(self.tile == tile, values_NC, 0.0).to(product.dtype)
        columns, values = self._placed(product, values, tokens_last)
        product.scatter_add_(0 if tokens_last else -1, columns, values)

    def _placed(self, product: Tensor, values: Tensor, tokens_last: bool) -> tuple[Tensor, Tensor]:
        width = product.shape[0 if tokens_last else -1]
        # The last tile may be narrower. Its own ids fit; a clamped column is another tile's id, without effect here.
        columns = self.column if width == self.block_vocab else self.column.clamp(max=width - 1)
        return (columns.T, values.T) if tokens_last else (columns, values)


GivenCells = CellIndex | ScatteredCells


def given_cells(inputs: PassInputs) -> GivenCells:
    """Returns the places of the given ids, by the way that suits the device."""
    return CellIndex(inputs) if devices.free_to_look(inputs.ids) else ScatteredCells(inputs)

"""Products kept from the forward pass in the buffer that becomes the head's gradient: three products instead of four.

A trained head's gradient needs a [V, D] buffer anyway. Until the backward pass writes to it, the buffer has room for
the products of D rows (in the head's dtype). The backward pass takes the tiles from the last to the first: it reads a
tile of products, writes the gradient with respect to them elsewhere, and overwrites the buffer with that tile of the
head's gradient. Tiles are packed from the buffer's start, R ≤ D numbers for each id, so it overwrites products of this
tile and of later ones only.

    products   | tile 0 | tile 1 | tile 2 |           |      tile t starts at R · (its first id)
    gradient   |  tile 0   |  tile 1   |  tile 2   |         tile t starts at D · (its first id)

Rows beyond the buffer's room are recomputed, in whole blocks.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class KeptLogits(NamedTuple):
    """Marked products of the first rows of a pass, tile by tile, as [rows, ids of the tile]."""

    buffer: Tensor
    """[V, D], in the head's dtype."""
    num_rows: int
    dtype: torch.dtype
    """The products' dtype."""
    chosen: Tensor | None = None
    """[N], the kept row of each row of the pass. None if they are the same."""

    def holds(self, rows: slice) -> bool:
        """Returns True if the products of all these rows are kept."""
        if self.chosen is None:
            return rows.stop <= self.num_rows
        # Chosen rows ascend, so the last one decides. Only a CPU chooses rows, and there reading is free.
        return rows.stop > rows.start and int(self.chosen[rows.stop - 1]) < self.num_rows

    def tile(self, columns: slice, rows: slice) -> Tensor:
        """Returns some rows of a tile: a view, or a copy if the rows were chosen."""
        flat = self.buffer.view(-1).view(self.dtype)[columns.start * self.num_rows : columns.stop * self.num_rows]
        whole = flat.view(self.num_rows, columns.stop - columns.start)
        return whole[rows] if self.chosen is None else whole.index_select(0, self.chosen[rows])


def room_for(hidden_ND: Tensor, head_VD: Tensor, product_dtype: torch.dtype, block_rows: int) -> int:
    """Returns the number of rows whose products fit into the head's gradient: all of them, or whole blocks."""
    num_rows, width = hidden_ND.shape
    fitting = width * head_VD.dtype.itemsize // product_dtype.itemsize
    return num_rows if num_rows <= fitting else fitting // block_rows * block_rows

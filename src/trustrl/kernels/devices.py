"""Choices of the vocabulary pass that depend on the device: reading values, and the sizes of tiles."""

import torch
from torch import Tensor

CPU_TILE = 1024, 4096
"""(tokens, vocabulary ids) of a tile on a CPU: 8 MB in bf16, so that it is still in cache when its sums are made."""

TILE_BYTES = 128 * 2**20
"""Bytes of a tile of products on an accelerator.

A tile of R tokens and W ids takes 2·R·W·D operations. It reads W·D elements of the head, and reads and writes an [R, D]
float32 gradient. With F operations per byte (about 300 on an H100 in bf16) these transfers take F / R and 4·F / W of
the product's time: 7% each at R = 4,096 and W = 16,384, which is 128 MB in bf16. Uncompiled arithmetic holds up to four
float32 copies of a tile, eight times as much; compiled arithmetic holds none.
"""

ACCELERATOR_ROWS = 4096
COLUMN_STEP = 256
"""Tiles of an accelerator are multiples of this many ids, for aligned products."""

BUFFER_BYTES = 64 * 2**20
"""Size of the Triton backward pass's buffer, unless `SLICES` asks for a larger one."""

SLICES = 16
"""Largest number of slices of the vocabulary in that pass; each reads and writes the hidden states' gradient once."""

CPU_GATHERED_BYTES = 16 * 2**20
"""Bytes of the head rows that are gathered at once on a CPU, in float32. An accelerator gathers `TILE_BYTES`."""


def free_to_look(values: Tensor) -> bool:
    """Returns True if reading a value does not wait for a device (on CPU), so control flow may depend on it."""
    return values.device.type == "cpu"


def tile_sizes(hidden_ND: Tensor, product_dtype: torch.dtype) -> tuple[int, int]:
    """Returns (tokens, vocabulary ids) of a tile for these hidden states.

    Example:
        >>> tile_sizes(torch.empty(1024, 8), torch.bfloat16)
        (1024, 4096)
        >>> tile_sizes(torch.empty(1024, 8, device="meta"), torch.bfloat16)
        (1024, 65536)
    """
    if free_to_look(hidden_ND):
        return CPU_TILE
    rows = max(1, min(hidden_ND.shape[0], ACCELERATOR_ROWS))
    columns = TILE_BYTES // (rows * product_dtype.itemsize)
    return rows, columns // COLUMN_STEP * COLUMN_STEP


def gathered_rows(ids_NK: Tensor, width: int, dtype: torch.dtype) -> int:
    """Returns the number of rows whose given head rows, `width` numbers each, are gathered at once."""
    limit = CPU_GATHERED_BYTES if free_to_look(ids_NK) else TILE_BYTES
    return max(1, limit // max(1, ids_NK.shape[1] * width * dtype.itemsize))

"""`triton.jit` for this package's kernels, launch sizes, and arrays that the passes over the vocabulary take.

Importing this module needs `triton`.

Shape suffixes as in `triton_pass`: N tokens, D hidden size, V vocabulary, C known ids per token, W = C + 1 with an end
mark, S splits of the vocabulary.
"""
# `triton` may not be installed where types are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of the products."""

PROGRAMS = 512
"""Number of programs that the splits of the vocabulary aim at: a few for each multiprocessor of today's GPUs."""

LAST = 2**31 - 1
"""End mark of a row's ids; never due."""


class Launch(NamedTuple):
    """Tile and launch sizes of a kernel: tokens, columns and hidden units per tile."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    min_tiles: int = 8
    """Smallest number of tiles in a split."""
    row_blocks_per_group: int = 16
    """Number of row blocks that use the same head tile in succession, while it is in cache."""


LAUNCHES = {
    # (backend, bytes per element). Twice the columns per tile spills. AMD has 64 KB of shared memory, hence 2 stages.
    ("cuda", 2): Launch(rows=128, columns=128, depth=64, num_warps=8, num_stages=3),
    ("cuda", 4): Launch(rows=64, columns=64, depth=16, num_warps=4, num_stages=3),
    ("hip", 2): Launch(rows=128, columns=128, depth=64, num_warps=8, num_stages=2),
    ("hip", 4): Launch(rows=64, columns=64, depth=16, num_warps=4, num_stages=2),
}
TOP_K_LAUNCHES = LAUNCHES | {  # the candidates need registers too
    ("cuda", 2): Launch(rows=128, columns=64, depth=64, num_warps=8, num_stages=3),
}
DIVERGENCE_LAUNCHES = {
    # Two tiles of products at a time, so each is half as large.
    ("cuda", 2): Launch(rows=128, columns=64, depth=32, num_warps=8, num_stages=4),
    ("cuda", 4): Launch(rows=64, columns=32, depth=16, num_warps=4, num_stages=3),
    ("hip", 2): Launch(rows=128, columns=64, depth=64, num_warps=8, num_stages=2),
    ("hip", 4): Launch(rows=64, columns=32, depth=16, num_warps=4, num_stages=2),
}
ID_LAUNCH = {"IDS": 32, "DEPTH": 128, "num_warps": 4}
"""Kernels that visit single ids of a token."""

SLOTS = 4
"""Number of top candidates of a row that are compared at once. More of them spill."""


def jit(function: Callable[..., Any]) -> Any:
    """Returns `triton.jit(function)`, with a type that pyright can index and launch."""
    return triton.jit(function)


def launch_for(hidden_ND: Tensor, head_VD: Tensor, table: dict[tuple[str, int], Launch]) -> Launch:
    """Returns the entry of a launch table for these inputs. Raises TypeError if their dtypes are not supported."""
    if hidden_ND.dtype != head_VD.dtype or hidden_ND.dtype not in DTYPES:
        raise TypeError(
            "hidden states and head must share one of bfloat16, float16 and float32, "
            f"got {hidden_ND.dtype} and {head_VD.dtype}. Cast them, or use the plain torch pass."
        )
    backend = "cuda" if torch.version.hip is None else "hip"
    return table[backend, hidden_ND.element_size()]


def compile_time(launch: Launch, *depths: int) -> dict[str, Any]:
    """Returns the compile-time constants of a tiled kernel for these hidden sizes."""
    return {
        "ROWS": launch.rows, "COLUMNS": launch.columns, "DEPTH": launch.depth, "GROUP": launch.row_blocks_per_group,
        "EVEN_DEPTH": all(D % launch.depth == 0 for D in depths),
        # The interpreter multiplies the bits of a bfloat16 as if they were an integer.
        "UPCAST": bool(triton.knobs.runtime.interpret),
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip


def blocks(size: int, step: int) -> int:
    """Returns the number of blocks of `step` that cover `size`."""
    return -(-size // step)


def tiles_per_split(launch: Launch, N: int, V: int) -> int:
    """Returns the number of vocabulary tiles that one program streams past its rows.

    The fewer rows, the more splits: about `PROGRAMS` programs in all, and S · N ≤ PROGRAMS · rows + N.
    """
    splits = blocks(PROGRAMS, max(blocks(N, launch.rows), 1))
    return max(launch.min_tiles, blocks(blocks(V, launch.columns), splits))


class Rows(NamedTuple):
    """The rows of a pass in the order in which the kernels take them. The host never reads either."""

    order_N: Tensor
    """int32: the live rows, then the others."""
    num_live: Tensor
    """int32 [1]: the number of live rows."""


def ordered_rows(live_N: Tensor) -> Rows:
    """Returns the live rows first, each kind in its own order."""
    # A sort and not `nonzero`, whose number of results would be a wait.
    order_N = torch.argsort((~live_N).to(torch.uint8), stable=True)
    return Rows(order_N.int(), live_N.sum(dtype=torch.int32).reshape(1))


class DueIds(NamedTuple):
    """The counted ids of each row in ascending order, as a kernel meets them while it streams the vocabulary."""

    ids_NW: Tensor
    """int32: sorted, then end marks."""
    starts_SN: Tensor
    """int32: index in the flat `ids_NW` of the first id of each row in each split."""
    tiles: int
    """Number of tiles per split."""


def due_ids(ids_NC: Tensor, counts_NC: Tensor, V: int, launch: Launch) -> DueIds:
    """Returns the due ids of a launch over V columns."""
    N, device = len(ids_NC), ids_NC.device
    tiles = tiles_per_split(launch, N, V)
    due_NC = torch.where(counts_NC, ids_NC, LAST).sort(dim=-1).values
    # A kernel that has met a row's last id reads the mark from then on.
    due_NW = torch.nn.functional.pad(due_NC, (0, 1), value=LAST).int()
    columns_S = torch.arange(0, V, tiles * launch.columns, dtype=torch.int32, device=device)
    # Each program starts at its own split's first id, whatever the others do.
    place_NS = torch.searchsorted(due_NW, columns_S.repeat(N, 1), out_int32=True)
    row_N = torch.arange(N, dtype=torch.int32, device=device) * due_NW.shape[1]
    return DueIds(due_NW, (place_NS + row_N.unsqueeze(1)).T.contiguous(), tiles)


def aligned(hidden_ND: Tensor, head_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both with zeros up to a hidden size that is a multiple of 16; copies them if theirs is not.

    Loads that are not aligned to 16 bytes cannot be vectorized, and make the kernels spill.
    """
    missing = -hidden_ND.shape[1] % 16
    if not missing:
        return hidden_ND, head_VD
    return torch.nn.functional.pad(hidden_ND, (0, missing)), torch.nn.functional.pad(head_VD, (0, missing))


def dense(*tensors: Any) -> Any:
    """Returns contiguous tensors, because the kernels step through memory without strides. Others stay as they are."""
    return tuple(x.detach().contiguous() if isinstance(x, Tensor) else x for x in tensors)

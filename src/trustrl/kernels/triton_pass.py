r"""One pass over the vocabulary in Triton, for NVIDIA and AMD GPUs. The only pass that needs `triton`.

Replaces, without its [N, V] arrays,

    raw = hidden @ head.T + bias                # float32 products, never rounded to the inputs' dtype
    z = cap(raw) * scale                        # cap(x) = softcap · tanh(x / softcap), or x itself
    z = z.index_put((row, ids), -inf)           # at the counted ids
    rest = z.logsumexp(1)
    q = exp(z - rest)
    inner = -(q * log(q)).sum(1)
    largest = raw.abs().amax(1)                 # over the rest

and, with g the gradients of rest, of inner and of the logits at the ids,

    dz = q * (g_rest - g_inner * (log(q) + inner))
    dz = dz.scatter_add(1, ids, g_known) * slope                       # slope = ∂z/∂raw
    dz @ head, dz.T @ hidden, dz.sum(0)                                # dz in the inputs' dtype

**Forward.** A program streams `tiles_per_split` tiles of the vocabulary past one block of tokens and keeps, per token,
the maximum, Σe and Σe·(z − maximum) with e = exp(z − maximum). A few torch operations on [splits, N] merge the splits.
The ids of each row are sorted beforehand. Columns only ascend, so each row keeps its next due id, and one step over the
tile serves all its rows. A tile takes as many steps as its fullest row has ids in it, usually zero or one; comparing
every column with every id would take C.

**Backward.** One kernel recomputes the logits for as many columns as fit in a bounded buffer, and writes dz to it as if
no id were known. A second kernel overwrites the cells of the known ids. Torch computes the three products: it writes
each slice of the head's gradient once and accumulates d_hidden in float32.

Memory in addition to inputs and gradients: forward about 30 bytes per token and split; backward `BUFFER_BYTES` (or one
tile of columns for every token, if that is more) and d_hidden once in float32.

The kernels run under Triton's interpreter, and compile ahead of time for sm_80, sm_90, sm_100 and gfx942 without
spilling a register. They have not run on a GPU, and their speed is unknown.

Shape suffixes: N tokens, D hidden size, V vocabulary, C known ids per token, W = C + 1 with an end mark, S splits.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.kernels.triton_jit import interpreted
from trustrl.kernels.triton_kernels import FLOOR_VALUE, dz_kernel, known_kernel, rest_kernel

BUFFER_BYTES = 64 * 2**20

LAST = 2**31 - 1
"""End mark of a row's ids; never due."""


class Launch(NamedTuple):
    """Tile and launch sizes of a kernel: tokens, columns and hidden units per tile."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    tiles_per_split: int = 8
    row_blocks_per_group: int = 16
    """Number of row blocks that use the same head tile in succession, while it is in cache."""


LAUNCHES = {
    # (backend, bytes per element). Twice the columns per tile spills. AMD has 64 KB of shared memory, hence 2 stages.
    ("cuda", 2): Launch(rows=128, columns=128, depth=64, num_warps=8, num_stages=3),
    ("cuda", 4): Launch(rows=64, columns=64, depth=16, num_warps=4, num_stages=3),
    ("hip", 2): Launch(rows=128, columns=128, depth=64, num_warps=8, num_stages=2),
    ("hip", 4): Launch(rows=64, columns=64, depth=16, num_warps=4, num_stages=2),
}
KNOWN_LAUNCH = {"IDS": 32, "DEPTH": 128, "num_warps": 4}


def forward(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    bias_V: Float[Tensor, " V"] | None,
    ids_NC: Int[Tensor, "N C"],
    counts_NC: Bool[Tensor, "N C"],
    scale_N: Float[Tensor, " N"],
    softcap: float | None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Returns statistics of the rest: the vocabulary without the counted ids.

    Args:
        hidden_ND: bfloat16, float16 or float32.
        head_VD: The same dtype as `hidden_ND`.
        bias_V: Added to the products; −inf removes a column.
        ids_NC: 0 ≤ id < V, in any order, with or without repetitions.
        counts_NC: True on the first column of each id to exclude.
        scale_N: 1 / temperature.
        softcap: Bound of the logits before scaling.

    Returns:
        Per token, in float32: the log-sum-exp of the rest (−inf if the rest is empty), the entropy within the rest in
        nats, and the largest |product + bias| of the rest (both 0 if the rest is empty).
    """
    hidden_ND, head_VD, bias_V, scale_N, ids_NC = _dense(hidden_ND, head_VD, bias_V, scale_N.float(), ids_NC)
    (N, D), V = hidden_ND.shape, head_VD.shape[0]
    launch = launch_for(hidden_ND, head_VD)
    due_NC = torch.where(counts_NC.contiguous(), ids_NC, LAST).sort(dim=-1).values
    due_NW = torch.nn.functional.pad(due_NC, (0, 1), value=LAST).int()
    starts_SN = _first_due(due_NW, range(0, V, launch.columns * launch.tiles_per_split))
    splits = starts_SN.shape[0]
    partials_4SN = torch.empty(4, splits, N, dtype=torch.float32, device=hidden_ND.device)
    with torch.cuda.device_of(hidden_ND):
        rest_kernel[(_blocks(N, launch.rows) * splits,)](
            hidden_ND, head_VD, bias_V, scale_N, softcap, due_NW, starts_SN, partials_4SN, N, V, D, splits,
            **compile_time(launch, D), TILES=launch.tiles_per_split,
        )  # fmt: skip
    return _merged(*partials_4SN)


def backward(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    bias_V: Float[Tensor, " V"] | None,
    ids_NC: Int[Tensor, "N C"],
    counts_NC: Bool[Tensor, "N C"],
    scale_N: Float[Tensor, " N"],
    softcap: float | None,
    rest_N: Float[Tensor, " N"],
    inner_N: Float[Tensor, " N"],
    d_known_NC: Float[Tensor, "N C"],
    d_rest_N: Float[Tensor, " N"],
    d_inner_N: Float[Tensor, " N"],
    wants: tuple[bool, bool, bool],
) -> tuple[Float[Tensor, "N D"] | None, Float[Tensor, "V D"] | None, Float[Tensor, " V"] | None]:
    """Returns the gradients of hidden states, head and bias; None for each one that `wants` does not request.

    Takes the arguments of `forward`, its first two results, and the gradients of the logits at the ids, of rest and of
    inner. Gradients of columns with the same id are summed, counted or not. If a row's rest is empty, the gradients of
    rest and inner are ignored. A frozen head, `wants = (True, False, False)`, saves one of three products.
    """
    hidden_ND, head_VD, bias_V, scale_N, ids_NC = _dense(hidden_ND, head_VD, bias_V, scale_N.float(), ids_NC)
    d_known_NC = d_known_NC.float().contiguous()
    (N, D), V, C = hidden_ND.shape, head_VD.shape[0], ids_NC.shape[1]
    launch = launch_for(hidden_ND, head_VD)
    d_hidden_ND = torch.zeros_like(hidden_ND, dtype=torch.float32) if wants[0] else None
    d_head_VD = torch.empty_like(head_VD) if wants[1] else None
    d_bias_V = torch.empty_like(bias_V) if wants[2] and bias_V is not None else None

    live_N = rest_N != -torch.inf
    base_N = torch.where(live_N, rest_N, -FLOOR_VALUE)  # if the rest is empty, every q is 0
    on_rest_N = torch.where(live_N, d_rest_N - d_inner_N * inner_N, 0.0)
    on_log_N = torch.where(live_N, d_inner_N, 0.0)
    id_NC, put_NC, stays_NC = _distinct(ids_NC, counts_NC, d_known_NC)
    width = _buffer_columns(N, V, hidden_ND.element_size(), launch.columns)
    buffer = torch.empty(N, width, dtype=hidden_ND.dtype, device=hidden_ND.device)
    for first in range(0, V, width):
        last = min(first + width, V)
        tiles = _blocks(last - first, launch.columns)
        with torch.cuda.device_of(hidden_ND):
            dz_kernel[(_blocks(N, launch.rows) * tiles,)](
                hidden_ND, head_VD, bias_V, scale_N, softcap, base_N, on_rest_N, on_log_N, buffer,
                first, N, V, D, tiles, width, **compile_time(launch, D),
            )  # fmt: skip
            known_kernel[(N, _blocks(C, KNOWN_LAUNCH["IDS"]))](
                hidden_ND, head_VD, bias_V, scale_N, softcap, id_NC, put_NC, stays_NC, buffer,
                first, last, C, D, width, **KNOWN_LAUNCH,
            )  # fmt: skip
        dz = buffer[:, : last - first]
        if d_hidden_ND is not None:
            _add_product(d_hidden_ND, dz, head_VD[first:last])
        if d_head_VD is not None:
            torch.mm(dz.T, hidden_ND, out=d_head_VD[first:last])
        if d_bias_V is not None:
            d_bias_V[first:last] = dz.sum(0, dtype=torch.float32)
    return None if d_hidden_ND is None else d_hidden_ND.to(hidden_ND.dtype), d_head_VD, d_bias_V


def launch_for(hidden_ND: Tensor, head_VD: Tensor) -> Launch:
    """Returns the entry of `LAUNCHES` for these inputs. Raises TypeError if their dtypes are not supported."""
    if hidden_ND.dtype != head_VD.dtype or hidden_ND.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(
            "hidden states and head must share one of bfloat16, float16 and float32, "
            f"got {hidden_ND.dtype} and {head_VD.dtype}. Cast them, or use the plain torch pass."
        )
    return LAUNCHES["cuda" if torch.version.hip is None else "hip", hidden_ND.element_size()]


def compile_time(launch: Launch, D: int) -> dict[str, Any]:
    """Returns the compile-time constants of both tiled kernels."""
    return {
        "ROWS": launch.rows, "COLUMNS": launch.columns, "DEPTH": launch.depth, "GROUP": launch.row_blocks_per_group,
        "EVEN_DEPTH": D % launch.depth == 0,
        # The interpreter multiplies the bits of a bfloat16 as if they were an integer.
        "UPCAST": interpreted(),
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip


def _dense(*tensors: Any) -> Any:
    """Returns contiguous tensors, because the kernels step through memory without strides."""
    return tuple(None if x is None else x.contiguous() for x in tensors)


def _first_due(due_NW: Tensor, columns: range) -> Tensor:
    """Returns, per column and row, the index in the flat `due_NW` of the row's first id at or after the column."""
    N, W = due_NW.shape
    dtype, device = torch.int32, due_NW.device
    columns_S = torch.arange(columns.start, columns.stop, columns.step, dtype=dtype, device=device)
    place_NS = torch.searchsorted(due_NW, columns_S.repeat(N, 1), out_int32=True)
    row_N = torch.arange(N, dtype=dtype, device=device) * W
    return (place_NS + row_N.unsqueeze(1)).T.contiguous()


def _distinct(ids_NC: Tensor, counts_NC: Tensor, d_known_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each row's distinct ids, padded with −1: (id, its total gradient, 1 if the rest includes it as well).

    The gradients of one id are summed in float32, before any rounding: the sampled token is usually also one of the
    K ids, and its two gradients may cancel.
    """
    ordered_NC, source_NC = ids_NC.sort(dim=-1)
    starts_NC = torch.zeros_like(ordered_NC)
    starts_NC[:, 1:] = ordered_NC[:, 1:] != ordered_NC[:, :-1]
    place_NC = starts_NC.cumsum(-1)
    id_NC = torch.full_like(ordered_NC, -1).scatter_(1, place_NC, ordered_NC)
    put_NC = torch.zeros_like(d_known_NC).scatter_add_(1, place_NC, d_known_NC.gather(1, source_NC))
    num_counted_NC = torch.zeros_like(ordered_NC).scatter_add_(1, place_NC, counts_NC.to(ids_NC).gather(1, source_NC))
    return id_NC.int(), put_NC, (num_counted_NC == 0).int()


def _merged(top_SN: Tensor, total_SN: Tensor, moment_SN: Tensor, largest_SN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (log-sum-exp, entropy, largest product) over all splits. A split without a cell has top −inf."""
    top_N = top_SN.amax(0)
    shift_N = torch.where(top_N == -torch.inf, 0.0, top_N)  # −inf − −inf is NaN
    moved_SN = torch.where(top_SN == -torch.inf, 0.0, top_SN - shift_N)
    keep_SN = torch.exp(top_SN - shift_N)
    total_N = (total_SN * keep_SN).sum(0)
    moment_N = ((moment_SN + moved_SN * total_SN) * keep_SN).sum(0)
    log_total_N = torch.log(total_N)
    inner_N = torch.where(total_N == 0, 0.0, log_total_N - moment_N / total_N)
    return shift_N + log_total_N, inner_N, largest_SN.amax(0)


def _blocks(size: int, step: int) -> int:
    """Returns the number of blocks of `step` that cover `size`."""
    return -(-size // step)


def _buffer_columns(N: int, V: int, bytes_each: int, step: int) -> int:
    """Returns the number of columns in the buffer: whole tiles, at least one, at most the vocabulary."""
    fitting = BUFFER_BYTES // max(N * bytes_each, 1) // step
    return max(1, min(fitting, _blocks(V, step))) * step


def _add_product(total_ND: Tensor, dz: Tensor, head: Tensor) -> None:
    """Computes total += dz @ head in place, without rounding below float32."""
    if dz.is_cuda and dz.dtype != torch.float32:
        torch.addmm(total_ND, dz, head, out_dtype=torch.float32, out=total_ND)
    else:  # torch has `out_dtype` on GPUs only
        total_ND.addmm_(dz.float(), head.float())

r"""NVIDIA and AMD GPUs: one pass over the vocabulary in Triton. Needs `triton`; nothing else in the library does.

Replaces, without its [N, V] arrays,

    raw = hidden @ head.T + bias                # float32 products, never rounded to the inputs' dtype
    z = cap(raw) * scale                        # cap(x) = softcap · tanh(x / softcap), or x itself
    z = z.index_put((row, ids), -inf)           # at the ids that count
    rest = z.logsumexp(1)
    q = exp(z - rest)
    inner = -(q * log(q)).sum(1)
    largest = raw.abs().amax(1)                 # of what is left

and, with g the gradients of rest, of inner and of the logits at the ids,

    dz = q * (g_rest - g_inner * (log(q) + inner))
    dz = dz.scatter_add(1, ids, g_known) * slope                       # slope = ∂z/∂raw
    dz @ head, dz.T @ hidden, dz.sum(0)                                # dz in the inputs' dtype

**Forward.** A program streams `tiles_per_split` tiles of the vocabulary past one block of tokens and keeps, per token,
the maximum, Σe and Σe·(z − maximum) with e = exp(z − maximum). A few torch operations on [splits, N] merge the splits.
The ids are sorted row by row beforehand. Columns only ascend, so each row keeps the next id that is due, and one step
over the tile serves all its rows: a tile takes as many steps as its fullest row has ids in it, usually none or one,
where comparing every column with every id would take C.

**Backward.** The logits are computed again for as many columns as fit a bounded buffer, and dz is written to it as if
no id were known. A second kernel overwrites the cells of the known ids. Torch's own products do the rest: each slice of
the head's gradient is written once, d_hidden adds up in float32.

Memory beside inputs and gradients: forward about 30 bytes per token and split; backward `BUFFER_BYTES` (or one tile of
columns for every token, if that is more) and d_hidden once in float32.

So far the kernels have run under Triton's interpreter, and been compiled ahead of time for sm_80, sm_90, sm_100 and
gfx942 without spilling a register. They have not run on a GPU, and nothing is known of their speed.

Shape suffixes: N tokens, D hidden size, V vocabulary, C known ids per token, W = C + 1 with an end mark, S splits.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

BUFFER_BYTES = 64 * 2**20

LAST = 2**31 - 1
"""The end mark of a row's ids: never due."""

FLOOR = tl.constexpr(-1e20)
"""The raw product of a cell that is not there. Finite, so that 0 · FLOOR is 0 and FLOOR − FLOOR is no NaN."""


class Launch(NamedTuple):
    """How a kernel cuts its work: tokens, columns and hidden units per tile."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    tiles_per_split: int = 8
    row_blocks_per_group: int = 16
    """So many blocks of rows take the same head tile one after the other, while it is in cache."""


LAUNCHES = {
    # (backend, bytes per element); a tile of twice the columns spills. AMD has 64 KB of shared memory, hence 2 stages.
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
    """What is left of the vocabulary without the ids that count.

    Args:
        hidden_ND: bfloat16, float16 or float32.
        head_VD: of the same dtype.
        bias_V: added to the products; −inf takes a column out.
        ids_NC: 0 ≤ id < V, in any order, repeated or not.
        counts_NC: True on the first column of each id to leave out.
        scale_N: 1 / temperature.
        softcap: bound of the logits before scaling.

    Returns:
        Per token, in float32: the log-sum-exp of the rest (−inf where nothing is left), the entropy within the rest in
        nats, and the largest |product + bias| of the rest (both 0 where nothing is left).
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
        rest_kernel[(triton.cdiv(N, launch.rows) * splits,)](
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
    """Gradients of hidden states, head and bias, each where `wants` says so and None elsewhere.

    Takes what `forward` took, the first two of its results, and the gradients of the logits at the ids, of rest and of
    inner. Columns with the same id add up, whether they count or not. Where nothing is left, the gradients of rest and
    inner are ignored. A frozen head, `wants = (True, False, False)`, saves one of three products.
    """
    hidden_ND, head_VD, bias_V, scale_N, ids_NC = _dense(hidden_ND, head_VD, bias_V, scale_N.float(), ids_NC)
    d_known_NC = d_known_NC.float().contiguous()
    (N, D), V, C = hidden_ND.shape, head_VD.shape[0], ids_NC.shape[1]
    launch = launch_for(hidden_ND, head_VD)
    d_hidden_ND = torch.zeros_like(hidden_ND, dtype=torch.float32) if wants[0] else None
    d_head_VD = torch.empty_like(head_VD) if wants[1] else None
    d_bias_V = torch.empty_like(bias_V) if wants[2] and bias_V is not None else None

    live_N = rest_N != -torch.inf
    base_N = torch.where(live_N, rest_N, -FLOOR.value)  # where nothing is left, every q is 0
    on_rest_N = torch.where(live_N, d_rest_N - d_inner_N * inner_N, 0.0)
    on_log_N = torch.where(live_N, d_inner_N, 0.0)
    id_NC, put_NC, stays_NC = _distinct(ids_NC, counts_NC, d_known_NC)
    width = _buffer_columns(N, V, hidden_ND.element_size(), launch.columns)
    buffer = torch.empty(N, width, dtype=hidden_ND.dtype, device=hidden_ND.device)
    for first in range(0, V, width):
        last = min(first + width, V)
        tiles = triton.cdiv(last - first, launch.columns)
        with torch.cuda.device_of(hidden_ND):
            dz_kernel[(triton.cdiv(N, launch.rows) * tiles,)](
                hidden_ND, head_VD, bias_V, scale_N, softcap, base_N, on_rest_N, on_log_N, buffer,
                first, N, V, D, tiles, width, **compile_time(launch, D),
            )  # fmt: skip
            known_kernel[(N, triton.cdiv(C, KNOWN_LAUNCH["IDS"]))](
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
    """The entry of `LAUNCHES` for these inputs; TypeError if there is none."""
    if hidden_ND.dtype != head_VD.dtype or hidden_ND.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(
            "hidden states and head must share one of bfloat16, float16 and float32, "
            f"got {hidden_ND.dtype} and {head_VD.dtype}. Cast them, or use the plain torch pass."
        )
    return LAUNCHES["cuda" if torch.version.hip is None else "hip", hidden_ND.element_size()]


def compile_time(launch: Launch, D: int) -> dict[str, Any]:
    """What both tiled kernels are specialised on."""
    return {
        "ROWS": launch.rows, "COLUMNS": launch.columns, "DEPTH": launch.depth, "GROUP": launch.row_blocks_per_group,
        "EVEN_DEPTH": D % launch.depth == 0,
        # The interpreter multiplies the bits of a bfloat16 as if they were an integer.
        "UPCAST": bool(triton.knobs.runtime.interpret),
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip


def _dense(*tensors: Any) -> Any:
    """The kernels step through memory without strides."""
    return tuple(None if x is None else x.contiguous() for x in tensors)


def _first_due(due_NW: Tensor, columns: range) -> Tensor:
    """Per column and row, where in the flat `due_NW` the row's first id at or after the column stands."""
    N, W = due_NW.shape
    like = {"dtype": torch.int32, "device": due_NW.device}
    columns_S = torch.arange(columns.start, columns.stop, columns.step, **like)
    place_NS = torch.searchsorted(due_NW, columns_S.repeat(N, 1), out_int32=True)
    row_N = torch.arange(N, **like) * W
    return (place_NS + row_N.unsqueeze(1)).T.contiguous()


def _distinct(ids_NC: Tensor, counts_NC: Tensor, d_known_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's distinct ids, then −1: (id, its total gradient, whether it stays in the rest as well).

    The gradients of one id are added in float32, before anything is rounded: the sampled token is usually among the
    K ids too, and its two gradients may cancel.
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
    """(log-sum-exp, entropy, largest product) over all splits; a split without a cell has top −inf."""
    top_N = top_SN.amax(0)
    shift_N = torch.where(top_N == -torch.inf, 0.0, top_N)  # −inf − −inf is NaN
    moved_SN = torch.where(top_SN == -torch.inf, 0.0, top_SN - shift_N)
    keep_SN = torch.exp(top_SN - shift_N)
    total_N = (total_SN * keep_SN).sum(0)
    moment_N = ((moment_SN + moved_SN * total_SN) * keep_SN).sum(0)
    log_total_N = torch.log(total_N)
    inner_N = torch.where(total_N == 0, 0.0, log_total_N - moment_N / total_N)
    return shift_N + log_total_N, inner_N, largest_SN.amax(0)


def _buffer_columns(N: int, V: int, bytes_each: int, step: int) -> int:
    """As many whole tiles of columns as fit the buffer: at least one, at most the vocabulary."""
    fitting = BUFFER_BYTES // max(N * bytes_each, 1) // step
    return max(1, min(fitting, triton.cdiv(V, step))) * step


def _add_product(total_ND: Tensor, dz: Tensor, head: Tensor) -> None:
    """total += dz @ head, with nothing rounded below float32 on the way."""
    if dz.is_cuda and dz.dtype != torch.float32:
        torch.addmm(total_ND, dz, head, out_dtype=torch.float32, out=total_ND)
    else:  # torch has `out_dtype` on GPUs only
        total_ND.addmm_(dz.float(), head.float())


@triton.jit
def rest_kernel(
    hidden, head, bias, scale, softcap, ids, starts, partials, N, V, D, splits,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, EVEN_DEPTH: tl.constexpr,
    UPCAST: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One block of rows over one split of the vocabulary: running maximum, Σe, Σe·(z − maximum), largest product."""
    rows, split = _place(tl.cdiv(N, ROWS), splits, ROWS, GROUP)
    row = tl.minimum(rows, N - 1)  # rows past the end repeat the last one and are not written
    factor = tl.load(scale + row)
    at = tl.load(starts + split * N + row)
    due = tl.load(ids + at)
    top = factor * FLOOR
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    largest = tl.zeros((ROWS,), tl.float32)
    first = split * TILES * COLUMNS
    for column in range(first, tl.minimum(first + TILES * COLUMNS, V), COLUMNS):
        raw = _raw_tile(hidden, head, bias, row, column, V, D, ROWS, COLUMNS, DEPTH, EVEN_DEPTH, UPCAST)
        columns = column + tl.arange(0, COLUMNS)
        while tl.min(due, 0) < column + COLUMNS:
            raw = tl.where(columns[None, :] == due[:, None], FLOOR, raw)
            at += tl.where(due < column + COLUMNS, 1, 0)
            due = tl.load(ids + at)
        largest = tl.maximum(largest, tl.max(tl.where(raw == FLOOR, 0.0, tl.abs(raw)), 1))
        z, _ = _logit(raw, factor[:, None], softcap)
        higher = tl.maximum(top, tl.max(z, 1))
        below = z - higher[:, None]
        e = tl.exp(below)
        keep = tl.exp(top - higher)
        moment = (moment + (top - higher) * total) * keep + tl.sum(e * below, 1)
        total = total * keep + tl.sum(e, 1)
        top = higher
    top = tl.where(top > factor * (0.5 * FLOOR), top, -float("inf"))  # otherwise there was no cell
    out = partials + split * N + rows
    tl.store(out, top, mask=rows < N)
    tl.store(out + splits * N, total, mask=rows < N)
    tl.store(out + 2 * splits * N, moment, mask=rows < N)
    tl.store(out + 3 * splits * N, largest, mask=rows < N)


@triton.jit
def dz_kernel(
    hidden, head, bias, scale, softcap, base, on_rest, on_log, dz, first, N, V, D, tiles, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, EVEN_DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient in the raw products, as if no id were known: q (on_rest − on_log · log q) · slope."""
    rows, tile = _place(tl.cdiv(N, ROWS), tiles, ROWS, GROUP)
    row = tl.minimum(rows, N - 1)
    column = first + tile * COLUMNS
    raw = _raw_tile(hidden, head, bias, row, column, V, D, ROWS, COLUMNS, DEPTH, EVEN_DEPTH, UPCAST)
    z, slope = _logit(raw, tl.load(scale + row)[:, None], softcap)
    log_q = z - tl.load(base + row)[:, None]
    each = tl.exp(log_q) * (tl.load(on_rest + row)[:, None] - tl.load(on_log + row)[:, None] * log_q) * slope
    columns = column + tl.arange(0, COLUMNS)
    out = dz + rows.to(tl.int64)[:, None] * width + (columns - first)[None, :]
    tl.store(out, each.to(dz.dtype.element_ty), mask=(rows < N)[:, None] & (columns < V)[None, :])


@triton.jit
def known_kernel(
    hidden, head, bias, scale, softcap, ids, put, stay, dz, first, last, C, D, width,
    IDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The cells of the known ids: one token, those of its ids that lie in first ≤ id < last."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * IDS + tl.arange(0, IDS)
    at = row * C + places
    column = tl.load(ids + at, mask=places < C, other=-1)
    here = (column >= first) & (column < last)
    if tl.max(here.to(tl.int32), 0) == 0:
        return
    raw = tl.zeros((IDS,), tl.float32)
    if softcap is not None:  # the slope depends on the product, so it is formed again
        depth = tl.arange(0, DEPTH)
        for done in range(0, D, DEPTH):
            within = depth < D - done
            h = tl.load(hidden + row * D + done + depth, mask=within, other=0.0).to(tl.float32)
            head_at = head + column.to(tl.int64)[:, None] * D + done + depth[None, :]
            w = tl.load(head_at, mask=here[:, None] & within[None, :], other=0.0).to(tl.float32)
            raw += tl.sum(h[None, :] * w, 1)
        if bias is not None:
            raw += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)
    _, slope = _logit(raw, tl.load(scale + row), softcap)
    cell = dz + row * width + (column - first)
    # Read only where the id stays in the rest: an excluded logit may lie far above the rest, and its q is infinite.
    stays = tl.load(stay + at, mask=here, other=0) != 0
    rest = tl.load(cell, mask=here & stays, other=0.0).to(tl.float32)
    each = rest + tl.load(put + at, mask=here, other=0.0) * slope
    tl.store(cell, each.to(dz.dtype.element_ty), mask=here)


@triton.jit
def _place(row_blocks, others, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """(rows, index along the vocabulary) of this program."""
    program = tl.program_id(0)
    block, other = tl.swizzle2d(program // others, program % others, row_blocks, others, GROUP)
    return block * ROWS + tl.arange(0, ROWS), other


@triton.jit
def _raw_tile(
    hidden, head, bias, row, column, V, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN_DEPTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """hidden @ head.T + bias in float32; FLOOR past the end of the vocabulary and where the bias is −inf."""
    columns = column + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # 64-bit offsets: a large head has more than 2³¹ elements.
    hidden_at = hidden + row.to(tl.int64)[:, None] * D + depth[None, :]
    head_at = head + tl.minimum(columns, V - 1).to(tl.int64)[None, :] * D + depth[:, None]
    raw = tl.zeros((ROWS, COLUMNS), tl.float32)
    for done in range(0, D, DEPTH):
        if EVEN_DEPTH:
            h = tl.load(hidden_at)
            w = tl.load(head_at)
        else:
            h = tl.load(hidden_at, mask=depth[None, :] < D - done, other=0.0)
            w = tl.load(head_at, mask=depth[:, None] < D - done, other=0.0)
        if UPCAST:
            h = h.to(tl.float32)
            w = w.to(tl.float32)
        raw = tl.dot(h, w, raw, input_precision="ieee")
        hidden_at += DEPTH
        head_at += DEPTH
    if bias is not None:
        raw += tl.load(bias + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
        raw = tl.maximum(raw, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(columns[None, :] < V, raw, FLOOR)


@triton.jit
def _logit(raw, factor, softcap):
    """(logit, its slope in the raw product)."""
    if softcap is None:
        z = raw * factor
        slope = factor
    else:
        t = tl.exp(tl.abs(raw) * (-2.0 / softcap))  # cannot overflow
        tanh = (1.0 - t) / (1.0 + t)
        z = tl.where(raw == FLOOR, FLOOR, softcap * tl.where(raw < 0, -tanh, tanh)) * factor
        slope = (1.0 - tanh * tanh) * factor
    return z, slope

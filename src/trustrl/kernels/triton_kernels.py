"""Triton device functions of `triton_pass`, which defines what they compute.

Shape suffixes as there: N tokens, D hidden size, V vocabulary, C known ids per token.
"""
# The bodies are Triton's language, whose values have no Python types; `triton` itself may not be installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingImports=false

import triton.language as tl

from trustrl.kernels.triton_jit import jit

FLOOR_VALUE = -1e20
"""Raw product of an absent cell. Finite, so that 0 · FLOOR is 0 and FLOOR − FLOOR is not NaN."""

FLOOR = tl.constexpr(FLOOR_VALUE)


@jit
def rest_kernel(
    hidden, head, bias, scale, softcap, ids, starts, partials, N, V, D, splits,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, EVEN_DEPTH: tl.constexpr,
    UPCAST: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Reduces one split of the vocabulary for one block of rows: maximum, Σe, Σe·(z − maximum), largest product."""
    rows, split = _place(tl.cdiv(N, ROWS), splits, ROWS, GROUP)
    row = tl.minimum(rows, N - 1)  # rows past the end repeat the last row and are not stored
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
    top = tl.where(top > factor * (0.5 * FLOOR), top, -float("inf"))  # otherwise the split had no cell
    out = partials + split * N + rows
    tl.store(out, top, mask=rows < N)
    tl.store(out + splits * N, total, mask=rows < N)
    tl.store(out + 2 * splits * N, moment, mask=rows < N)
    tl.store(out + 3 * splits * N, largest, mask=rows < N)


@jit
def dz_kernel(
    hidden, head, bias, scale, softcap, base, on_rest, on_log, dz, first, N, V, D, tiles, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, EVEN_DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Writes one tile of the raw products' gradient, as if no id were known: q (on_rest − on_log · log q) · slope."""
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


@jit
def known_kernel(
    hidden, head, bias, scale, softcap, ids, put, stay, dz, first, last, C, D, width,
    IDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Overwrites the cells of one token's known ids in first ≤ id < last."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * IDS + tl.arange(0, IDS)
    at = row * C + places
    column = tl.load(ids + at, mask=places < C, other=-1)
    here = (column >= first) & (column < last)
    if tl.max(here.to(tl.int32), 0) == 0:
        return
    raw = tl.zeros((IDS,), tl.float32)
    if softcap is not None:  # the slope depends on the product, so recompute it
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
    # Read only ids that the rest includes: an excluded logit may lie far above the rest, and its q may be infinite.
    stays = tl.load(stay + at, mask=here, other=0) != 0
    rest = tl.load(cell, mask=here & stays, other=0.0).to(tl.float32)
    each = rest + tl.load(put + at, mask=here, other=0.0) * slope
    tl.store(cell, each.to(dz.dtype.element_ty), mask=here)


@jit
def _place(row_blocks, others, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Returns (rows, index along the vocabulary) of this program."""
    program = tl.program_id(0)
    block, other = tl.swizzle2d(program // others, program % others, row_blocks, others, GROUP)
    return block * ROWS + tl.arange(0, ROWS), other


@jit
def _raw_tile(
    hidden, head, bias, row, column, V, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN_DEPTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Returns hidden @ head.T + bias in float32; FLOOR past the end of the vocabulary and where the bias is −inf."""
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


@jit
def _logit(raw, factor, softcap):
    """Returns (logit, ∂logit/∂raw product)."""
    if softcap is None:
        z = raw * factor
        slope = factor
    else:
        t = tl.exp(tl.abs(raw) * (-2.0 / softcap))  # cannot overflow
        tanh = (1.0 - t) / (1.0 + t)
        z = tl.where(raw == FLOOR, FLOOR, softcap * tl.where(raw < 0, -tanh, tanh)) * factor
        slope = (1.0 - tanh * tanh) * factor
    return z, slope

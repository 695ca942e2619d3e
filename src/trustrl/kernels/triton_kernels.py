"""Triton kernels of `triton_pass` and `triton_divergence`, which define what they compute.

All kernels take the rows in an order with the live ones first, and the number of live rows as a tensor on the device.
A block without a live row returns at once, so nobody has to know that number on the host.

Shape suffixes as there: N tokens, D hidden size, V vocabulary, C known ids per token, K top candidates per split.
"""
# The bodies are Triton's language, whose values have no Python types; `triton` itself may not be installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingImports=false

import triton.language as tl

from trustrl.kernels.triton_launch import jit

FLOOR_VALUE = -1e20
"""Raw product of an absent cell. Finite, so that 0 · FLOOR is 0 and FLOOR − FLOOR is not NaN."""

FLOOR = tl.constexpr(FLOOR_VALUE)


@jit
def place(row_blocks, others, GROUP: tl.constexpr):
    """Returns (block of rows, index along the vocabulary) of this program."""
    program = tl.program_id(0)
    return tl.swizzle2d(program // others, program % others, row_blocks, others, GROUP)


@jit
def rows_of(block, order, live, ROWS: tl.constexpr):
    """Returns (rows of a block, True where the row is to be stored). Places past the last live row repeat it."""
    places = block * ROWS + tl.arange(0, ROWS)
    # Every lane gets a row that exists, so loads of its data need no mask.
    return tl.load(order + tl.minimum(places, live - 1)), places < live


@jit
def raw_tile(
    hidden, head, bias, row, column, V, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN_DEPTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Returns hidden @ head.T + bias in float32; FLOOR past the end of the vocabulary and where the bias is −inf."""
    columns = column + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # 64-bit offsets: a large head has more than 2³¹ elements.
    hidden_at = hidden + row.to(tl.int64)[:, None] * D + depth[None, :]
    # Columns past the end read the last row of the head. The last line blanks them, so the loop needs no mask.
    head_at = head + tl.minimum(columns, V - 1).to(tl.int64)[None, :] * D + depth[:, None]
    raw = tl.zeros((ROWS, COLUMNS), tl.float32)
    for done in range(0, D, DEPTH):
        # A hidden size that DEPTH divides leaves no remainder to mask.
        if EVEN_DEPTH:
            h = tl.load(hidden_at)
            w = tl.load(head_at)
        else:
            h = tl.load(hidden_at, mask=depth[None, :] < D - done, other=0.0)
            w = tl.load(head_at, mask=depth[:, None] < D - done, other=0.0)
        if UPCAST:
            h = h.to(tl.float32)
            w = w.to(tl.float32)
        # Not TF32, which would round float32 inputs to 11 significant bits.
        raw = tl.dot(h, w, raw, input_precision="ieee")
        hidden_at += DEPTH
        head_at += DEPTH
    if bias is not None:
        raw += tl.load(bias + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
        # A bias of −inf makes the cell absent. A NaN must stay one: as FLOOR, a fault would look like an absent cell.
        raw = tl.maximum(raw, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(columns[None, :] < V, raw, FLOOR)


@jit
def raw_at(
    hidden, head, bias, row, column, present, D,
    IDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Returns one token's products with a few rows of the head, plus their bias, in float32; 0 where not present."""
    depth = tl.arange(0, DEPTH)
    # One row of hidden states is too narrow for `tl.dot`.
    sums = tl.zeros((IDS, DEPTH), tl.float32)
    for done in range(0, D, DEPTH):
        within = depth < D - done
        h = tl.load(hidden + row * D + done + depth, mask=within, other=0.0).to(tl.float32)
        head_at = head + column.to(tl.int64)[:, None] * D + done + depth[None, :]
        w = tl.load(head_at, mask=present[:, None] & within[None, :], other=0.0).to(tl.float32)
        sums += h[None, :] * w
    raw = tl.sum(sums, 1)
    if bias is not None:
        raw += tl.load(bias + column, mask=present, other=0.0).to(tl.float32)
        raw = tl.maximum(raw, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return raw


@jit
def logit(raw, factor, softcap):
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


@jit
def rest_kernel(
    hidden, head, bias, scale, softcap, order, num_live, ids, starts, partials, best_raw, best_ids,
    N, V, D, K, splits, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, EVEN_DEPTH: tl.constexpr,
    UPCAST: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Reduces one split of the vocabulary for one block of rows: maximum, Σe, Σe·(z − maximum), largest product.

    With `best_raw`, moves the split's K largest products into it. The sums exclude these K products.
    """
    block, split = place(tl.cdiv(N, ROWS), splits, GROUP)
    live = tl.load(num_live)
    if block * ROWS >= live:
        return
    row, stored = rows_of(block, order, live, ROWS)
    factor = tl.load(scale + row)
    cursor = tl.load(starts + split * N + row)
    due = tl.load(ids + cursor)
    top = factor * FLOOR
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    largest = tl.zeros((ROWS,), tl.float32)
    # The K best products so far are in global memory; registers hold the least of them and its slot.
    least = tl.full((ROWS,), FLOOR, tl.float32)
    slot = tl.zeros((ROWS,), tl.int32)
    first = split * tiles * COLUMNS
    for column in range(first, tl.minimum(first + tiles * COLUMNS, V), COLUMNS):
        raw = raw_tile(hidden, head, bias, row, column, V, D, ROWS, COLUMNS, DEPTH, EVEN_DEPTH, UPCAST)
        columns = column + tl.arange(0, COLUMNS)
        # Ids and columns both ascend, so each row waits for one id at a time, and a step serves all rows.
        while tl.min(due, 0) < column + COLUMNS:
            raw = tl.where(columns[None, :] == due[:, None], FLOOR, raw)
            cursor += tl.where(due < column + COLUMNS, 1, 0)
            due = tl.load(ids + cursor)
        # A search and not a sort: hardly any product of a later tile is above the least of the K best so far.
        if best_raw is not None:
            best = tl.max(raw, 1)
            takes = stored & (best > least)
            while tl.max(takes.to(tl.int32), 0) > 0:
                # The smallest of equal products' ids, so that one cell leaves the tile and not several.
                id = tl.min(tl.where(raw == best[:, None], columns[None, :], V), 1)
                raw = tl.where(takes[:, None] & (columns[None, :] == id[:, None]), FLOOR, raw)
                # The product that leaves the list joins the sums. A slot that is still free holds FLOOR.
                leaves = takes & (least > FLOOR)
                z, _ = logit(least, factor, softcap)
                top, total, moment = _joined(top, total, moment, z, leaves)
                largest = tl.maximum(largest, tl.where(leaves, tl.abs(least), 0.0))
                list_at = (split * N + row).to(tl.int64) * K
                least, slot = _replace(best_raw, best_ids, list_at, K, takes, slot, best, id, ROWS, SLOTS)
                best = tl.max(raw, 1)
                takes = stored & (best > least)
        largest = tl.maximum(largest, tl.max(tl.where(raw == FLOOR, 0.0, tl.abs(raw)), 1))
        z, _ = logit(raw, factor[:, None], softcap)
        # Sums are relative to the largest logit so far, so no exponential overflows.
        higher = tl.maximum(top, tl.max(z, 1))
        below = z - higher[:, None]
        e = tl.exp(below)
        keep = tl.exp(top - higher)
        moment = (moment + (top - higher) * total) * keep + tl.sum(e * below, 1)
        total = total * keep + tl.sum(e, 1)
        top = higher
    top = tl.where(top > factor * (0.5 * FLOOR), top, -float("inf"))  # otherwise the split had no cell
    out = partials + split * N + row
    tl.store(out, top, mask=stored)
    tl.store(out + splits * N, total, mask=stored)
    tl.store(out + 2 * splits * N, moment, mask=stored)
    tl.store(out + 3 * splits * N, largest, mask=stored)


@jit
def _joined(top, total, moment, z, joins):
    """Returns the sums of each row with one more logit, where it joins them."""
    higher = tl.where(joins, tl.maximum(top, z), top)
    e = tl.where(joins, tl.exp(z - higher), 0.0)
    keep = tl.exp(top - higher)
    moment = (moment + (top - higher) * total) * keep + e * tl.where(joins, z - higher, 0.0)
    return higher, total * keep + e, moment


@jit
def _replace(best_raw, best_ids, list_at, K, takes, slot, raw, id, ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """Puts (raw, id) into the given slot of each row that takes one. Returns the least of each list and its slot."""
    least = tl.full((ROWS,), float("inf"), tl.float32)
    where = tl.zeros((ROWS,), tl.int32)
    for done in range(0, K, SLOTS):
        slots = done + tl.arange(0, SLOTS)
        offsets = list_at[:, None] + slots[None, :]
        listed = tl.load(best_raw + offsets, mask=(slots < K)[None, :], other=float("inf"))
        replaced = takes[:, None] & (slots[None, :] == slot[:, None])
        # Load and store have one layout: each thread reads back only what it wrote itself.
        tl.store(best_raw + offsets, tl.broadcast_to(raw[:, None], (ROWS, SLOTS)), mask=replaced)
        tl.store(best_ids + offsets, tl.broadcast_to(id[:, None], (ROWS, SLOTS)), mask=replaced)
        listed = tl.where(replaced, raw[:, None], listed)
        low = tl.min(listed, 1)
        index = tl.min(tl.where(listed == low[:, None], slots[None, :], K), 1)
        where = tl.where(low < least, index, where)
        least = tl.minimum(least, low)
    tl.debug_barrier()
    return least, where


@jit
def dz_kernel(
    hidden, head, bias, scale, softcap, order, num_live, base, on_rest, on_log, dz, first, N, V, D, tiles, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, EVEN_DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Writes one tile of the raw products' gradient, as if no id were known: q (on_rest − on_log · log q) · slope."""
    block, tile = place(tl.cdiv(N, ROWS), tiles, GROUP)
    live = tl.load(num_live)
    if block * ROWS >= live:
        return
    row, stored = rows_of(block, order, live, ROWS)
    column = first + tile * COLUMNS
    raw = raw_tile(hidden, head, bias, row, column, V, D, ROWS, COLUMNS, DEPTH, EVEN_DEPTH, UPCAST)
    z, slope = logit(raw, tl.load(scale + row)[:, None], softcap)
    log_q = z - tl.load(base + row)[:, None]
    # Cells of known ids are wrong here. `known_kernel` overwrites them, so this kernel need not look for them.
    each = tl.exp(log_q) * (tl.load(on_rest + row)[:, None] - tl.load(on_log + row)[:, None] * log_q) * slope
    columns = column + tl.arange(0, COLUMNS)
    out = dz + row.to(tl.int64)[:, None] * width + (columns - first)[None, :]
    tl.store(out, each.to(dz.dtype.element_ty), mask=stored[:, None] & (columns < V)[None, :])


@jit
def known_kernel(
    hidden, head, bias, scale, softcap, order, num_live, ids, put, stay, dz, first, last, C, D, width,
    IDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Overwrites the cells of one token's known ids in first ≤ id < last."""
    if tl.program_id(0) >= tl.load(num_live):
        return
    row = tl.load(order + tl.program_id(0)).to(tl.int64)
    places = tl.program_id(1) * IDS + tl.arange(0, IDS)
    offsets = row * C + places
    column = tl.load(ids + offsets, mask=places < C, other=-1)
    here = (column >= first) & (column < last)
    # The buffer holds one slice of the vocabulary, and a row has few ids in it.
    if tl.max(here.to(tl.int32), 0) == 0:
        return
    raw = tl.zeros((IDS,), tl.float32)
    if softcap is not None:  # the slope depends on the product, so recompute it
        raw = raw_at(hidden, head, bias, row, column, here, D, IDS, DEPTH)
    _, slope = logit(raw, tl.load(scale + row), softcap)
    cell = dz + row * width + (column - first)
    # Read only ids that the rest includes: an excluded logit may lie far above the rest, and its q may be infinite.
    stays = tl.load(stay + offsets, mask=here, other=0) != 0
    rest = tl.load(cell, mask=here & stays, other=0.0).to(tl.float32)
    each = rest + tl.load(put + offsets, mask=here, other=0.0) * slope
    # A row's ids are distinct, so no other program stores to this cell.
    tl.store(cell, each.to(dz.dtype.element_ty), mask=here)


@jit
def given_kernel(
    hidden, head, bias, scale, softcap, order, num_live, ids, out, C, D,
    IDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Writes the logits of one token at a few given ids."""
    if tl.program_id(0) >= tl.load(num_live):
        return
    row = tl.load(order + tl.program_id(0)).to(tl.int64)
    places = tl.program_id(1) * IDS + tl.arange(0, IDS)
    present = places < C
    column = tl.load(ids + row * C + places, mask=present, other=0)
    raw = raw_at(hidden, head, bias, row, column, present, D, IDS, DEPTH)
    z, _ = logit(raw, tl.load(scale + row), softcap)
    tl.store(out + row * C + places, tl.where(raw == FLOOR, -float("inf"), z), mask=present)


@jit
def divergence_kernel(
    hidden, head, bias, other_hidden, other_head, other_bias, scale, softcap, base, other_base, order, num_live,
    ids, starts, partials, N, V, D, other_D, splits, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, EVEN_DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Sums |m − p| and m (eˣ − 1 − x), x = log p − log m, over one split of the vocabulary without the given ids."""
    block, split = place(tl.cdiv(N, ROWS), splits, GROUP)
    live = tl.load(num_live)
    if block * ROWS >= live:
        return
    row, stored = rows_of(block, order, live, ROWS)
    factor = tl.load(scale + row)[:, None]
    cursor = tl.load(starts + split * N + row)
    due = tl.load(ids + cursor)
    absolute = tl.zeros((ROWS,), tl.float32)
    relative = tl.zeros((ROWS,), tl.float32)
    first = split * tiles * COLUMNS
    for column in range(first, tl.minimum(first + tiles * COLUMNS, V), COLUMNS):
        raw = raw_tile(hidden, head, bias, row, column, V, D, ROWS, COLUMNS, DEPTH, EVEN_DEPTH, UPCAST)
        other = raw_tile(
            other_hidden, other_head, other_bias, row, column, V, other_D, ROWS, COLUMNS, DEPTH, EVEN_DEPTH, UPCAST
        )
        columns = column + tl.arange(0, COLUMNS)
        # As in `rest_kernel`, for both sides.
        while tl.min(due, 0) < column + COLUMNS:
            is_due = columns[None, :] == due[:, None]
            raw = tl.where(is_due, FLOOR, raw)
            other = tl.where(is_due, FLOOR, other)
            cursor += tl.where(due < column + COLUMNS, 1, 0)
            due = tl.load(ids + cursor)
        z, _ = logit(raw, factor, softcap)
        other_z, _ = logit(other, factor, softcap)
        log_p = tl.where(raw == FLOOR, -float("inf"), z) - tl.load(base + row)[:, None]
        log_m = tl.where(other == FLOOR, -float("inf"), other_z) - tl.load(other_base + row)[:, None]
        p = tl.exp(log_p)
        m = tl.exp(log_m)
        absolute += tl.sum(tl.abs(m - p), 1)
        relative += tl.sum(tl.where(m == 0.0, p, _relative(p, m, log_p - log_m)), 1)
    out = partials + split * N + row
    tl.store(out, absolute, mask=stored)
    tl.store(out + splits * N, relative, mask=stored)


@jit
def _relative(p, m, x):
    """Returns m (eˣ − 1 − x): by its series near 0, where the difference would cancel, else as p − m − m x."""
    series = 1.0 / 720 + x * (1.0 / 5040 + x * (1.0 / 40320))
    series = 0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * series)))
    return tl.where(tl.abs(x) < 0.5, m * x * x * series, p - m - m * x)

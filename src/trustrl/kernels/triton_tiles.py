"""Device functions that the Triton kernels share: the place of a program, a tile of products, a logit.

Shape suffixes as in `triton_pass`: N tokens, D hidden size, V vocabulary.
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

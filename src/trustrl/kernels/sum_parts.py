"""Device functions that `sum_kernels` calls: one block of tokens into a sum, a maximum, a histogram or bins."""
# The bodies are Triton's language, whose values have no Python types; `triton` itself may not be installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingImports=false

import triton.language as tl

from trustrl.kernels.triton_jit import jit


@jit
def put(out, slot, x):
    """Stores the sum over the block."""
    tl.store(out + slot, tl.sum(x.to(tl.float64), 0))  # counts too: the slots of a block are one float64 row


@jit
def top(out, slot, x, on):
    """Stores the maximum over the block where `on`."""
    tl.store(out + slot, tl.max(tl.where(on, x, -float("inf")), 0))


@jit
def add_to_bins(bins, x, on, HALF: tl.constexpr, FIRST_BIN: tl.constexpr, BIN_SHIFT: tl.constexpr):
    """Counts the block in a histogram whose scale is the leading bits of a float32."""
    # float32 as in `bin_of`: the bits of a float64 would put tokens on a bin's edge into the other bin.
    leading = tl.abs(x).to(tl.float32).to(tl.int32, bitcast=True) >> BIN_SHIFT
    step = tl.minimum(tl.maximum(leading - FIRST_BIN, 0), HALF)
    sign = (x > 0).to(tl.int32) - (x < 0).to(tl.int32)
    # Atomic adds come in any order, which whole numbers in float64 do not show.
    tl.atomic_add(bins + HALF + sign * step, tl.full(x.shape, 1.0, tl.float64), mask=on)


@jit
def put_binned(out, x, on, masked, gap, EDGES: tl.constexpr):
    """Stores tokens, masked tokens and Σ|gap| for each of eight bins of x, bin by bin."""
    place = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(len(EDGES)):
        # A bare edge would be rounded to float32, and a token between the two numbers would change its bin.
        place += (x >= tl.full(x.shape, EDGES[i], tl.float64)).to(tl.int32)
    each = on[:, None] & (place[:, None] == tl.arange(0, 8)[None, :])  # eight, because a tile's side is a power of two
    to = out + 3 * tl.arange(0, 8)
    tl.store(to, tl.sum(each.to(tl.float64), 0))
    tl.store(to + 1, tl.sum((each & masked[:, None]).to(tl.float64), 0))
    tl.store(to + 2, tl.sum(tl.where(each, tl.abs(gap)[:, None], 0.0), 0))

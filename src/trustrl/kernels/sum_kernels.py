"""Triton device functions of `token_pass.sums`, which names the sums in their order.

Each program sums one block of tokens in float64. Only histograms, which count, are added atomically.
"""
# The bodies are Triton's language, whose values have no Python types; `triton` itself may not be installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingImports=false

import triton.language as tl

from trustrl.kernels.triton_jit import jit


@jit
def sums_kernel(
    in_loss, usable, overflow, keep, advantage, log_policy, log_anchor, log_ratio, weight, side, lower, upper,
    tail_anchor, tail_policy, entropy, mismatch, staleness, max_increase, max_decrease, partials,
    extremes, bins, n, num_bins, bound_step, PROBABILITY_EDGES: tl.constexpr, STALENESS_EDGES: tl.constexpr,
    LARGEST_LOG_RATIO: tl.constexpr, LARGEST_EXPONENT: tl.constexpr, HALF: tl.constexpr, FIRST_BIN: tl.constexpr,
    BIN_SHIFT: tl.constexpr, BOUNDED: tl.constexpr, NARROWS: tl.constexpr, NUM_SUMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums everything that metrics read over one block of tokens, and adds the block to the histograms."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = at < n
    mine = tl.load(in_loss + at, mask=here, other=0) != 0
    on = tl.load(usable + at, mask=here, other=0) != 0
    over = tl.load(overflow + at, mask=here, other=0) != 0
    gain = tl.load(advantage + at, mask=here, other=0.0)
    kept = tl.load(keep + at, mask=here, other=1) != 0
    masked = ~kept & (gain != 0)
    ratio_log = tl.load(log_ratio + at, mask=here, other=0.0)
    toward = ratio_log if side is None else tl.load(side + at, mask=here, other=0.0)
    anchor = tl.exp(tl.load(log_anchor + at, mask=here, other=0.0))
    gap = tl.exp(tl.load(log_policy + at, mask=here, other=0.0)) - anchor
    out = partials + tl.program_id(0) * NUM_SUMS
    top = extremes + tl.program_id(0) * 8
    _put(out, 0, mine)
    _put(out, 1, on)
    _put(out, 2, on & ~over)
    _put(out, 3, over)
    _put(out, 4, on & (gain != 0))
    _put(out, 5, on & masked)
    _put(out, 6, on & masked & (toward > 0))
    _put(out, 7, on & masked & (toward < 0))
    _put(out, 10, on & (gain < 0) & (gap <= -0.5))
    _sum_movement(gap, ratio_log, on, out, top, LARGEST_LOG_RATIO, LARGEST_EXPONENT)
    acting = on & ~over & kept
    factor = tl.where(acting, tl.load(weight + at, mask=here, other=0.0), 0.0)
    limit = tl.exp(tl.full((ROWS,), LARGEST_EXPONENT, tl.float64))
    _put(out, 15, acting)
    _put(out, 16, tl.minimum(tl.maximum(factor, -limit), limit))
    _add_to_bins(bins, gap, on, HALF, FIRST_BIN, BIN_SHIFT)
    _add_to_bins(bins + num_bins, ratio_log, on, HALF, FIRST_BIN, BIN_SHIFT)
    if lower is not None:
        _sum_divergence(
            lower, upper, max_increase, max_decrease, bound_step, out, top, bins + 2 * num_bins, num_bins, at, here, on,
            toward, HALF, FIRST_BIN, BIN_SHIFT, BOUNDED, NARROWS,
        )  # fmt: skip
    if tail_anchor is not None:
        _put(out, 24, tl.where(on, tl.load(tail_anchor + at, mask=here, other=0.0), 0.0))
        _put(out, 25, tl.where(on, tl.load(tail_policy + at, mask=here, other=0.0), 0.0))
    if entropy is not None:
        spread = tl.load(entropy + at, mask=here, other=0.0).to(tl.float64)
        _sum_entropy(spread, on & (tl.abs(spread) < float("inf")), masked, out)
    if mismatch is not None:
        log_k = tl.load(mismatch + at, mask=here, other=0.0)
        _sum_mismatch(log_k, on & (log_k == log_k), LARGEST_EXPONENT, out, top)
    _put_binned(out + 40, anchor, on, masked, gap, PROBABILITY_EDGES)
    if staleness is not None:
        age = tl.load(staleness + at, mask=here, other=0.0)
        _put(out, 33, tl.where(on, age, 0.0))
        _top(top, 6, age, on)
        _put_binned(out + 64, age, on, masked, gap, STALENESS_EDGES)


@jit
def _sum_movement(gap, log_ratio, on, out, top, LARGEST_LOG_RATIO: tl.constexpr, LARGEST_EXPONENT: tl.constexpr):
    """Sums the probability gap π − b and the ratio π/b."""
    held = tl.minimum(tl.maximum(log_ratio, -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO)
    ratio = tl.exp(tl.minimum(held, LARGEST_EXPONENT))
    _put(out, 8, tl.where(on, gap, 0.0))
    _put(out, 9, tl.where(on, tl.abs(gap), 0.0))
    _put(out, 11, tl.where(on, ratio, 0.0))
    _put(out, 12, tl.where(on, ratio * ratio, 0.0))
    _put(out, 13, tl.where(on, held, 0.0))
    _put(out, 14, tl.where(on, held * held, 0.0))
    _top(top, 0, gap, on)
    _top(top, 1, -gap, on)
    _top(top, 2, log_ratio, on)


@jit
def _sum_divergence(
    lower, upper, max_increase, max_decrease, bound_step, out, top, bins, num_bins, at, here, on, toward,
    HALF: tl.constexpr, FIRST_BIN: tl.constexpr, BIN_SHIFT: tl.constexpr, BOUNDED: tl.constexpr, NARROWS: tl.constexpr,
):  # fmt: skip
    """Sums both ends of the interval, and counts the tokens whose bound lies between them."""
    low = tl.load(lower + at, mask=here, other=0.0)
    _put(out, 17, tl.where(on & (low < float("inf")), low, 0.0))
    _put(out, 18, on & (low < float("inf")))
    _put(out, 19, on & (low == float("inf")))
    _top(top, 3, low, on)
    _add_to_bins(bins, low, on, HALF, FIRST_BIN, BIN_SHIFT)
    high = low
    if upper is not None:
        high = tl.load(upper + at, mask=here, other=0.0)
        _put(out, 20, tl.where(on & (high < float("inf")), high, 0.0))
        _put(out, 21, on & (high < float("inf")))
        _add_to_bins(bins + num_bins, high, on, HALF, FIRST_BIN, BIN_SHIFT)
    if BOUNDED:
        _put(out, 22, on & (low >= 0))
        if NARROWS:
            increase = tl.load(max_increase + at * bound_step, mask=here, other=0.0)
            decrease = tl.load(max_decrease + at * bound_step, mask=here, other=0.0)
            bound = tl.where(toward > 0, increase, decrease)
            _put(out, 23, on & (low <= bound) & (bound < high))


@jit
def _sum_entropy(spread, seen, masked, out):
    _put(out, 26, tl.where(seen & ~masked, spread, 0.0))
    _put(out, 27, seen & ~masked)
    _put(out, 28, tl.where(seen & masked, spread, 0.0))
    _put(out, 29, seen & masked)


@jit
def _sum_mismatch(log_k, seen, LARGEST_EXPONENT: tl.constexpr, out, top):
    log_k = tl.where(seen, log_k, 0.0)
    _put(out, 30, seen)
    _put(out, 31, tl.where(seen, tl.exp(tl.minimum(log_k, LARGEST_EXPONENT)), 0.0))
    _put(out, 32, tl.abs(log_k))
    _top(top, 4, log_k, seen)
    _top(top, 5, -log_k, seen)


@jit
def _put(out, place, x):
    """Stores the sum over the block."""
    tl.store(out + place, tl.sum(x.to(tl.float64), 0))


@jit
def _top(out, place, x, on):
    """Stores the maximum over the block where `on`."""
    tl.store(out + place, tl.max(tl.where(on, x, -float("inf")), 0))


@jit
def _add_to_bins(bins, x, on, HALF: tl.constexpr, FIRST_BIN: tl.constexpr, BIN_SHIFT: tl.constexpr):
    """Counts the block in a histogram whose scale is the leading bits of a float32."""
    leading = tl.abs(x).to(tl.float32).to(tl.int32, bitcast=True) >> BIN_SHIFT
    step = tl.minimum(tl.maximum(leading - FIRST_BIN, 0), HALF)
    sign = (x > 0).to(tl.int32) - (x < 0).to(tl.int32)
    tl.atomic_add(bins + HALF + sign * step, tl.full(x.shape, 1.0, tl.float64), mask=on)


@jit
def _put_binned(out, x, on, masked, gap, EDGES: tl.constexpr):
    """Stores tokens, masked tokens and Σ|gap| for each of eight bins of x, bin by bin."""
    place = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(len(EDGES)):
        place += (x >= tl.full(x.shape, EDGES[i], tl.float64)).to(tl.int32)
    each = on[:, None] & (place[:, None] == tl.arange(0, 8)[None, :])
    to = out + 3 * tl.arange(0, 8)
    tl.store(to, tl.sum(each.to(tl.float64), 0))
    tl.store(to + 1, tl.sum((each & masked[:, None]).to(tl.float64), 0))
    tl.store(to + 2, tl.sum(tl.where(each, tl.abs(gap)[:, None], 0.0), 0))

"""Sums over tokens in one Triton launch.

Written by `python scripts/sums.py` from `trustrl.core.sum_table`: change the rows there.
"""
# The bodies are Triton's language, whose values have no Python types; `triton` itself may not be installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingImports=false
# fmt: off
# ruff: noqa

import triton.language as tl

from trustrl.kernels.token_kernels import add_to_bins, put, put_binned, top
from trustrl.kernels.triton_launch import jit

NUM_SUMS, NUM_EXTREMES, NUM_HISTOGRAMS = 84, 7, 4
SUMS: dict[str, int] = {
    "tokens": 0,
    "fault/overflow": 1,
    "measured": 2,
    "used": 3,
    "signed": 4,
    "masked": 5,
    "masked/increase": 6,
    "masked/decrease": 7,
    "bad_updates": 8,
    "gap": 9,
    "gap/abs": 10,
    "anchor/masked": 11,
    "ratio": 12,
    "ratio/square": 13,
    "log_ratio": 14,
    "log_ratio/square": 15,
    "acting": 16,
    "weight": 17,
    "divergence": 18,
    "divergence/finite": 19,
    "divergence/infinite": 20,
    "divergence/upper": 21,
    "divergence/upper_finite": 22,
    "bounded": 23,
    "undecided": 24,
    "tail/anchor": 25,
    "tail/policy": 26,
    "tail/measured": 2,
    "entropy/kept": 27,
    "entropy/kept_measured": 28,
    "entropy/masked": 29,
    "entropy/masked_measured": 30,
    "mismatch/measured": 31,
    "mismatch": 32,
    "mismatch/abs": 33,
    "mismatch/gap": 34,
    "staleness": 35,
    "staleness/measured": 2,
}
EXTREMES: dict[str, int] = {
    "max/gap": 0,
    "min/gap": 1,
    "max/log_ratio": 2,
    "max/divergence": 3,
    "max/mismatch": 4,
    "min/mismatch": 5,
    "max/staleness": 6,
}
HISTOGRAMS: dict[str, int] = {
    "histogram/gap": 0,
    "histogram/log_ratio": 1,
    "histogram/divergence": 2,
    "histogram/divergence_upper": 3,
}
BINNED: dict[str, int] = {
    "by_probability": 36,
    "by_staleness": 60,
}
"""Slot of each row."""

NEEDS: dict[str, tuple[str, ...]] = {
    "divergence": ("lower",),
    "divergence/finite": ("lower",),
    "divergence/infinite": ("lower",),
    "max/divergence": ("lower",),
    "histogram/divergence": ("lower",),
    "divergence/upper": ("lower", "upper"),
    "divergence/upper_finite": ("lower", "upper"),
    "histogram/divergence_upper": ("lower", "upper"),
    "bounded": ("lower", "bounded"),
    "undecided": ("lower", "bounded", "max_increase", "max_decrease"),
    "tail/anchor": ("tail_anchor", "tail_policy"),
    "tail/policy": ("tail_anchor", "tail_policy"),
    "tail/measured": ("tail_anchor", "tail_policy"),
    "entropy/kept": ("entropy",),
    "entropy/kept_measured": ("entropy",),
    "entropy/masked": ("entropy",),
    "entropy/masked_measured": ("entropy",),
    "mismatch/measured": ("mismatch",),
    "mismatch": ("mismatch",),
    "mismatch/abs": ("mismatch",),
    "mismatch/gap": ("mismatch",),
    "max/mismatch": ("mismatch",),
    "min/mismatch": ("mismatch",),
    "staleness": ("staleness",),
    "max/staleness": ("staleness",),
    "staleness/measured": ("staleness",),
    "by_staleness": ("staleness",),
}
"""Columns without which a row's slot holds garbage."""


@jit
def sums_kernel(
    in_loss, usable, overflow, keep, advantage, log_policy,
    log_anchor, log_ratio, weight, side, lower, upper,
    tail_anchor, tail_policy, entropy, mismatch, staleness, max_increase,
    max_decrease,
    bounded: tl.constexpr, around_sampler: tl.constexpr, LARGEST_LOG_RATIO: tl.constexpr, LARGEST_EXPONENT: tl.constexpr, LARGEST_WEIGHT: tl.constexpr,
    partials, extremes, bins, n, num_bins, bound_step, PROBABILITY_EDGES: tl.constexpr, STALENESS_EDGES: tl.constexpr,
    HALF: tl.constexpr, FIRST_BIN: tl.constexpr, BIN_SHIFT: tl.constexpr, NUM_SUMS: tl.constexpr,
    NUM_EXTREMES: tl.constexpr, ROWS: tl.constexpr,
):
    """Sums one block of tokens. Blocks are added in a fixed order later; only histograms, which count, are atomic."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < n
    out = partials + tl.program_id(0) * NUM_SUMS
    tops = extremes + tl.program_id(0) * NUM_EXTREMES
    # Numbers may arrive in the record's dtype. All sums are taken in float64, as the eager ones are.
    _in_loss = tl.load(in_loss + rows, mask=here, other=0) != 0
    put(out, 0, _in_loss)  # tokens
    _overflow = tl.load(overflow + rows, mask=here, other=0) != 0
    put(out, 1, _overflow)  # fault/overflow
    _usable = tl.load(usable + rows, mask=here, other=0) != 0
    put(out, 2, _usable)  # measured
    put(out, 3, _usable & (~_overflow))  # used
    _advantage = tl.load(advantage + rows, mask=here, other=0.0).to(tl.float64)
    put(out, 4, _usable & (_advantage != 0))  # signed
    _keep = tl.load(keep + rows, mask=here, other=1) != 0
    masked = ~_keep & (_advantage != 0)
    put(out, 5, _usable & (masked))  # masked
    _log_ratio = tl.load(log_ratio + rows, mask=here, other=0.0).to(tl.float64)
    direction = _log_ratio if side is None else tl.load(side + rows, mask=here, other=0.0).to(tl.float64)
    put(out, 6, _usable & (masked & (direction > 0)))  # masked/increase
    put(out, 7, _usable & (masked & (direction < 0)))  # masked/decrease
    _log_policy = tl.load(log_policy + rows, mask=here, other=0.0).to(tl.float64)
    _log_anchor = tl.load(log_anchor + rows, mask=here, other=0.0).to(tl.float64)
    anchor = tl.exp(_log_anchor)
    gap = tl.exp(_log_policy) - anchor
    put(out, 8, _usable & ((_advantage < 0) & (gap <= -0.5)))  # bad_updates
    put(out, 9, tl.where(_usable, gap, 0.0))  # gap
    put(out, 10, tl.where(_usable, tl.abs(gap), 0.0))  # gap/abs
    put(out, 11, tl.where(_usable, tl.where(masked, anchor, 0.0), 0.0))  # anchor/masked
    top(tops, 0, gap, _usable)  # max/gap
    top(tops, 1, -gap, _usable)  # min/gap
    add_to_bins(bins + 0 * num_bins, gap, _usable, HALF, FIRST_BIN, BIN_SHIFT)  # histogram/gap
    held = tl.minimum(tl.maximum(_log_ratio, -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO)
    ratio = tl.exp(tl.minimum(held, LARGEST_EXPONENT))
    put(out, 12, tl.where(_usable, ratio, 0.0))  # ratio
    put(out, 13, tl.where(_usable, ratio * ratio, 0.0))  # ratio/square
    put(out, 14, tl.where(_usable, held, 0.0))  # log_ratio
    put(out, 15, tl.where(_usable, held * held, 0.0))  # log_ratio/square
    top(tops, 2, _log_ratio, _usable)  # max/log_ratio
    add_to_bins(bins + 1 * num_bins, _log_ratio, _usable, HALF, FIRST_BIN, BIN_SHIFT)  # histogram/log_ratio
    acting = (_usable & ~_overflow) & _keep
    put(out, 16, acting)  # acting
    _weight = tl.load(weight + rows, mask=here, other=0.0).to(tl.float64)
    put(out, 17, tl.where(_usable, tl.minimum(tl.maximum(tl.where(acting, _weight, 0.0), -LARGEST_WEIGHT), LARGEST_WEIGHT), 0.0))  # weight
    if lower is not None:
        _lower = tl.load(lower + rows, mask=here, other=0.0).to(tl.float64)
        put(out, 18, tl.where(_usable, tl.where(_lower < float("inf"), _lower, 0.0), 0.0))  # divergence
        put(out, 19, _usable & (_lower < float("inf")))  # divergence/finite
        put(out, 20, _usable & (_lower == float("inf")))  # divergence/infinite
        top(tops, 3, _lower, _usable)  # max/divergence
        add_to_bins(bins + 2 * num_bins, _lower, _usable, HALF, FIRST_BIN, BIN_SHIFT)  # histogram/divergence
        if upper is not None:
            _upper = tl.load(upper + rows, mask=here, other=0.0).to(tl.float64)
            put(out, 21, tl.where(_usable, tl.where(_upper < float("inf"), _upper, 0.0), 0.0))  # divergence/upper
            put(out, 22, _usable & (_upper < float("inf")))  # divergence/upper_finite
            add_to_bins(bins + 3 * num_bins, _upper, _usable, HALF, FIRST_BIN, BIN_SHIFT)  # histogram/divergence_upper
        if bounded:
            put(out, 23, _usable & (_lower >= 0))  # bounded
            if max_increase is not None:
                if max_decrease is not None:
                    _max_increase = tl.load(max_increase + rows * bound_step, mask=here, other=0.0).to(tl.float64)
                    _max_decrease = tl.load(max_decrease + rows * bound_step, mask=here, other=0.0).to(tl.float64)
                    high = _lower if upper is None else tl.load(upper + rows, mask=here, other=0.0).to(tl.float64)
                    bound = tl.where(direction > 0, _max_increase, _max_decrease)
                    put(out, 24, _usable & ((_lower <= bound) & (bound < high)))  # undecided
    if tail_anchor is not None:
        if tail_policy is not None:
            _tail_anchor = tl.load(tail_anchor + rows, mask=here, other=0.0).to(tl.float64)
            put(out, 25, tl.where(_usable, tl.where(_usable, _tail_anchor, 0.0), 0.0))  # tail/anchor
            _tail_policy = tl.load(tail_policy + rows, mask=here, other=0.0).to(tl.float64)
            put(out, 26, tl.where(_usable, tl.where(_usable, _tail_policy, 0.0), 0.0))  # tail/policy
    if entropy is not None:
        _entropy = tl.load(entropy + rows, mask=here, other=0.0).to(tl.float64)
        seen = (tl.abs(_entropy) < float("inf"))
        spread = tl.where(_usable & seen, _entropy, 0.0)
        put(out, 27, tl.where(_usable, tl.where(masked, 0.0, spread), 0.0))  # entropy/kept
        put(out, 28, _usable & (seen & ~masked))  # entropy/kept_measured
        put(out, 29, tl.where(_usable, tl.where(masked, spread, 0.0), 0.0))  # entropy/masked
        put(out, 30, _usable & (seen & masked))  # entropy/masked_measured
    if mismatch is not None:
        _mismatch = tl.load(mismatch + rows, mask=here, other=0.0).to(tl.float64)
        both = (_mismatch == _mismatch)
        put(out, 31, _usable & (both))  # mismatch/measured
        log_k = tl.where(both, _mismatch, 0.0)
        put(out, 32, tl.where(_usable, tl.where(both, tl.exp(tl.minimum(log_k, LARGEST_EXPONENT)), 0.0), 0.0))  # mismatch
        put(out, 33, tl.where(_usable, tl.abs(log_k), 0.0))  # mismatch/abs
        other = tl.exp(_log_anchor + (log_k if around_sampler else -log_k))
        put(out, 34, tl.where(_usable, tl.abs(other - anchor), 0.0))  # mismatch/gap
        top(tops, 4, tl.where(both, _mismatch, -float("inf")), _usable)  # max/mismatch
        top(tops, 5, tl.where(both, -_mismatch, -float("inf")), _usable)  # min/mismatch
    put_binned(out + 36, anchor, _usable, masked, gap, PROBABILITY_EDGES)  # by_probability
    if staleness is not None:
        _staleness = tl.load(staleness + rows, mask=here, other=0.0).to(tl.float64)
        put(out, 35, tl.where(_usable, _staleness, 0.0))  # staleness
        top(tops, 6, _staleness, _usable)  # max/staleness
        put_binned(out + 60, _staleness, _usable, masked, gap, STALENESS_EDGES)  # by_staleness

"""Triton device functions of `token_pass`, which defines what they compute: one program for a block of tokens.

All arithmetic is in float64. A few hundred operations per token cost nothing beside a launch, even on GPUs that run
float64 at a 64th of their float32 rate.
"""
# The bodies are Triton's language, whose values have no Python types; `triton` itself may not be installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingImports=false

import triton.language as tl

from trustrl.kernels.triton_jit import jit

LOWEST_LOGIT = tl.constexpr(-1000.0)
"""Smallest log-prob in TROLL's products: −inf − −inf is NaN."""


@jit
def clean_kernel(
    logp, behavior, proximal, advantage, in_loss, version, ids, valid, anchor_columns, own_columns, tokens,
    anchor_tail, own_tail, out, blanked, usable_out, faults, n, per_advantage, trained_version, width,
    READS_BEHAVIOR: tl.constexpr, READS_PROXIMAL: tl.constexpr, FROM_BEHAVIOR: tl.constexpr,
    LARGEST: tl.constexpr, NOISE: tl.constexpr, MASS_COARSE: tl.constexpr, MASS_FINE: tl.constexpr,
    LEFT_OUT: tl.constexpr, NO_TAIL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Blanks faulty tokens, counts the faults, and sums the divergences over the recorded columns."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = at < n
    mine = tl.load(in_loss + at, mask=here, other=0) != 0
    policy = tl.load(logp + at, mask=here, other=0.0).to(tl.float64)
    gain = tl.load(advantage + at // per_advantage, mask=here, other=0.0).to(tl.float64)
    good = _possible(policy, LARGEST)
    usable = mine & good
    _count(faults, 0, mine & ~good)
    good = tl.abs(gain) < float("inf")
    usable = usable & good
    _count(faults, 1, mine & ~good)
    sampled_by = policy
    trained_at = policy
    if behavior is not None:
        sampled_by = tl.load(behavior + at, mask=here, other=0.0).to(tl.float64)
        if READS_BEHAVIOR:
            good = _possible(sampled_by, LARGEST)
            usable = usable & good
            _count(faults, 2, mine & ~good)
    if proximal is not None:
        trained_at = tl.load(proximal + at, mask=here, other=0.0).to(tl.float64)
        if READS_PROXIMAL:
            good = _possible(trained_at, LARGEST)
            usable = usable & good
            _count(faults, 3, mine & ~good)
    anchor = sampled_by if FROM_BEHAVIOR else trained_at
    if ids is not None:
        token = tl.load(tokens + at, mask=here, other=-1)
        column = tl.arange(0, COLUMNS)
        place = at.to(tl.int64)[:, None] * width + column[None, :]
        inside = here[:, None] & (column < width)[None, :]
        present = tl.load(valid + place, mask=inside, other=0) != 0
        is_token = present & (tl.load(ids + place, mask=inside, other=-1) == token[:, None])
        known = present & ~is_token
        log_b = tl.load(anchor_columns + place, mask=inside, other=0.0).to(tl.float64)
        log_p = tl.load(own_columns + place, mask=inside, other=0.0).to(tl.float64)
        token_b = tl.sum(tl.where(is_token, log_b, 0.0), 1)
        token_p = tl.sum(tl.where(is_token, log_p, 0.0), 1)
        has_token = tl.max(is_token.to(tl.int32), 1) > 0
        log_b = tl.where(known, log_b, -float("inf"))
        log_p = tl.where(known, log_p, -float("inf"))
        bad = ~_at_most(log_b, LARGEST) | ~_at_most(log_p, LARGEST)
        support = (token >= 0) & (tl.max(bad.to(tl.int32), 1) == 0)
        b = tl.exp(log_b)
        p = tl.exp(log_p)
        mass_b = tl.sum(b, 1)
        mass_p = tl.sum(p, 1)
        tail_b = tl.maximum(1.0 - tl.exp(anchor) - mass_b, 0.0)
        tail_p = tl.maximum(1.0 - tl.exp(policy) - mass_p, 0.0)
        all_b = mass_b + tl.exp(tl.where(has_token, token_b, anchor - NOISE))
        all_p = mass_p + tl.exp(policy)
        if anchor_tail is not None:
            log_tail_b = tl.load(anchor_tail + at, mask=here, other=0.0).to(tl.float64)
            log_tail_p = tl.load(own_tail + at, mask=here, other=0.0).to(tl.float64)
            support = support & _at_most(log_tail_b, LARGEST) & _at_most(log_tail_p, LARGEST)
            tail_b = tl.exp(log_tail_b)
            tail_p = tl.exp(log_tail_p)
            all_b += tail_b
            all_p += tail_p
        if NO_TAIL:
            tail_b = tl.zeros_like(tail_b)
            tail_p = tl.zeros_like(tail_p)
        judged = usable & support
        all_coarse_b = tl.min(_coarse(log_b).to(tl.int32), 1) > 0
        all_coarse_p = tl.min(_coarse(log_p).to(tl.int32), 1) > 0
        fits = _at_most_either(all_b, all_coarse_b, MASS_COARSE, MASS_FINE)
        fits = fits & _at_most_either(all_p, all_coarse_p, MASS_COARSE, MASS_FINE)
        slack = tl.where(_coarse(token_p) | _coarse(policy), 2.0**-7, 2.0**-23).to(tl.float64) * tl.abs(policy)
        same = tl.abs(token_p - policy) <= slack + tl.full((ROWS,), LARGEST, tl.float64)
        _count(faults, 4, mine & ~support)
        _count(faults, 5, mine & judged & ~fits)
        _count(faults, 6, mine & judged & has_token & ~same)
        fine = support & (~judged | fits) & (~judged | ~has_token | same)
        if LEFT_OUT is not None:
            enough = _at_most(1.0 - tl.exp(anchor) - mass_b, LEFT_OUT)
            _count(faults, 7, mine & judged & ~enough)
            fine = fine & (~judged | enough)
        usable = usable & fine
        gap = tl.maximum(log_p, LOWEST_LOGIT) - tl.maximum(log_b, LOWEST_LOGIT)
        kl = tl.where(b > 0, b * (log_b - tl.where(b > 0, log_p, 0.0)), 0.0) - b + p
        cells = out + 6 * n + at
        tl.store(cells, tl.where(usable, tail_b, 0.0), mask=here)
        tl.store(cells + n, tl.where(usable, tail_p, 0.0), mask=here)
        tl.store(cells + 2 * n, tl.where(usable, tl.sum(tl.abs(b - p), 1), 0.0), mask=here)
        tl.store(cells + 3 * n, tl.where(usable, tl.sum(kl, 1), 0.0), mask=here)
        tl.store(cells + 4 * n, tl.where(usable, tl.sum(p * gap, 1), 0.0), mask=here)
        tl.store(cells + 5 * n, tl.where(usable, mass_b, 0.0), mask=here)
        tl.store(cells + 6 * n, tl.where(usable, mass_p, 0.0), mask=here)
    tl.store(out + at, tl.where(usable, tl.minimum(policy, 0.0), 0.0), mask=here)
    tl.store(out + n + at, tl.where(usable, tl.minimum(anchor, 0.0), 0.0), mask=here)
    tl.store(out + 2 * n + at, tl.where(usable, policy - anchor, 0.0), mask=here)
    tl.store(out + 3 * n + at, tl.where(usable, gain, 0.0), mask=here)
    if (behavior is not None) and (proximal is not None):
        both = usable & _possible(sampled_by, LARGEST) & _possible(trained_at, LARGEST)
        mismatch = tl.where(both, trained_at - sampled_by, tl.where(usable, float("nan"), 0.0))
        tl.store(out + 4 * n + at, mismatch, mask=here)
    if version is not None:
        age = (trained_version - tl.load(version + at, mask=here, other=0)).to(tl.float64)
        tl.store(out + 5 * n + at, tl.where(usable, age, 0.0), mask=here)
    tl.store(blanked + at, tl.where(usable, policy, 0.0).to(blanked.dtype.element_ty), mask=here)
    tl.store(usable_out + at, usable, mask=here)


@jit
def terms_kernel(
    logp, keep, weight, advantage, usable, value, penalty, weights, coefficient, overflow, partials, n,
    LARGEST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes the detached coefficient of each token, flags terms that are not finite, and sums the loss of a block."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = at < n
    gain = tl.load(advantage + at, mask=here, other=0.0).to(tl.float64)
    kept = (tl.load(keep + at, mask=here, other=0) != 0) & (gain != 0)
    factor = tl.where(kept, tl.load(weight + at, mask=here, other=0.0).to(tl.float64), 0.0) * gain
    own = tl.load(logp + at, mask=here, other=0.0).to(tl.float64)
    if value is None:
        size = factor * own
    else:
        size = tl.where(gain != 0, tl.load(value + at, mask=here, other=0.0).to(tl.float64), 0.0)
    finite = _at_most(tl.abs(factor), LARGEST) & _at_most(tl.abs(size), LARGEST)
    extra = tl.zeros_like(gain)
    if penalty is not None:
        extra = tl.load(penalty + at, mask=here, other=0.0).to(tl.float64)
        finite = finite & _at_most(tl.abs(extra), LARGEST)
    mine = tl.load(usable + at, mask=here, other=0) != 0
    active = mine & finite
    tl.store(overflow + at, mine & ~finite, mask=here)
    share = tl.full((ROWS,), 1.0, tl.float64)
    if weights is not None:
        share = tl.where(mine, tl.load(weights + at, mask=here, other=0.0).to(tl.float64), 0.0)
    term = tl.where(active, extra - size, 0.0) * share
    tl.store(coefficient + at, (tl.where(active, factor, 0.0) * share).to(coefficient.dtype.element_ty), mask=here)
    tl.store(partials + tl.program_id(0), tl.sum(term, 0))


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
    _put(out, 8, tl.where(on, gap, 0.0))
    _put(out, 9, tl.where(on, tl.abs(gap), 0.0))
    _put(out, 10, on & (gain < 0) & (gap <= -0.5))
    held = tl.minimum(tl.maximum(ratio_log, -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO)
    ratio = tl.exp(tl.minimum(held, LARGEST_EXPONENT))
    _put(out, 11, tl.where(on, ratio, 0.0))
    _put(out, 12, tl.where(on, ratio * ratio, 0.0))
    _put(out, 13, tl.where(on, held, 0.0))
    _put(out, 14, tl.where(on, held * held, 0.0))
    acting = on & ~over & kept
    factor = tl.where(acting, tl.load(weight + at, mask=here, other=0.0), 0.0)
    limit = tl.exp(tl.full((ROWS,), LARGEST_EXPONENT, tl.float64))
    _put(out, 15, acting)
    _put(out, 16, tl.minimum(tl.maximum(factor, -limit), limit))
    _top(top, 0, gap, on)
    _top(top, 1, -gap, on)
    _top(top, 2, ratio_log, on)
    _add_to_bins(bins, gap, on, HALF, FIRST_BIN, BIN_SHIFT)
    _add_to_bins(bins + num_bins, ratio_log, on, HALF, FIRST_BIN, BIN_SHIFT)
    if lower is not None:
        low = tl.load(lower + at, mask=here, other=0.0)
        _put(out, 17, tl.where(on & (low < float("inf")), low, 0.0))
        _put(out, 18, on & (low < float("inf")))
        _put(out, 19, on & (low == float("inf")))
        _top(top, 3, low, on)
        _add_to_bins(bins + 2 * num_bins, low, on, HALF, FIRST_BIN, BIN_SHIFT)
        high = low
        if upper is not None:
            high = tl.load(upper + at, mask=here, other=0.0)
            _put(out, 20, tl.where(on & (high < float("inf")), high, 0.0))
            _put(out, 21, on & (high < float("inf")))
            _add_to_bins(bins + 3 * num_bins, high, on, HALF, FIRST_BIN, BIN_SHIFT)
        if BOUNDED:
            _put(out, 22, on & (low >= 0))
            if NARROWS:
                increase = tl.load(max_increase + at * bound_step, mask=here, other=0.0)
                decrease = tl.load(max_decrease + at * bound_step, mask=here, other=0.0)
                bound = tl.where(toward > 0, increase, decrease)
                _put(out, 23, on & (low <= bound) & (bound < high))
    if tail_anchor is not None:
        _put(out, 24, tl.where(on, tl.load(tail_anchor + at, mask=here, other=0.0), 0.0))
        _put(out, 25, tl.where(on, tl.load(tail_policy + at, mask=here, other=0.0), 0.0))
    if entropy is not None:
        spread = tl.load(entropy + at, mask=here, other=0.0).to(tl.float64)
        seen = on & (tl.abs(spread) < float("inf"))
        _put(out, 26, tl.where(seen & ~masked, spread, 0.0))
        _put(out, 27, seen & ~masked)
        _put(out, 28, tl.where(seen & masked, spread, 0.0))
        _put(out, 29, seen & masked)
    if mismatch is not None:
        log_k = tl.load(mismatch + at, mask=here, other=0.0)
        seen = on & (log_k == log_k)
        log_k = tl.where(seen, log_k, 0.0)
        _put(out, 30, seen)
        _put(out, 31, tl.where(seen, tl.exp(tl.minimum(log_k, LARGEST_EXPONENT)), 0.0))
        _put(out, 32, tl.abs(log_k))
        _top(top, 4, log_k, seen)
        _top(top, 5, -log_k, seen)
    _put_binned(out + 40, anchor, on, masked, gap, PROBABILITY_EDGES)
    if staleness is not None:
        age = tl.load(staleness + at, mask=here, other=0.0)
        _put(out, 33, tl.where(on, age, 0.0))
        _top(top, 6, age, on)
        _put_binned(out + 64, age, on, masked, gap, STALENESS_EDGES)


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


@jit
def _possible(logp, LARGEST: tl.constexpr):
    """Flags values that the log-prob of a sampled token can have."""
    return (logp > -float("inf")) & _at_most(logp, LARGEST)


@jit
def _at_most(x, LIMIT: tl.constexpr):
    """Compares in float64: a comparison with a bare constant would round the constant to float32."""
    return x <= tl.full(x.shape, LIMIT, tl.float64)


@jit
def _at_most_either(x, first, FIRST: tl.constexpr, SECOND: tl.constexpr):
    return tl.where(first, _at_most(x, FIRST), _at_most(x, SECOND))


@jit
def _coarse(x):
    """Flags numbers that fit 11 significant bits."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) & 0x1FFF) == 0


@jit
def _count(counters, place, flags):
    """Adds the number of flags to a counter. The sum of whole numbers does not depend on the order."""
    tl.atomic_add(counters + place, tl.sum(flags.to(tl.float64), 0))

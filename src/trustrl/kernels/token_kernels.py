"""Triton device functions of `token_pass`, which defines what they compute: one program for a block of tokens.

All arithmetic is in float64. A few hundred operations per token cost nothing next to a launch, even on GPUs that run
float64 at a 64th of their float32 rate.
"""
# The bodies are Triton's language, whose values have no Python types; `triton` itself may not be installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingImports=false

import triton.language as tl

from trustrl.kernels.triton_launch import jit


@jit
def clean_kernel(
    logp, behavior, proximal, advantage, in_loss, version, sound, ids, valid, anchor_columns, own_columns, tokens,
    anchor_tail, own_tail, out, blanked, usable_out, faults, n, per_advantage, trained_version, width,
    READS_BEHAVIOR: tl.constexpr, READS_PROXIMAL: tl.constexpr, FROM_BEHAVIOR: tl.constexpr,
    LARGEST: tl.constexpr, NOISE: tl.constexpr, MASS_COARSE: tl.constexpr, MASS_FINE: tl.constexpr,
    LEFT_OUT: tl.constexpr, NO_TAIL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Blanks faulty tokens, counts the faults, and sums the divergences over the recorded columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < n
    mine = tl.load(in_loss + rows, mask=here, other=0) != 0
    policy = tl.load(logp + rows, mask=here, other=0.0).to(tl.float64)
    # An advantage may belong to a whole sequence of tokens.
    gain = tl.load(advantage + rows // per_advantage, mask=here, other=0.0).to(tl.float64)
    good = _possible(policy, LARGEST)
    usable = mine & good
    # Faults of a record count every token in the loss that has them, whether or not another fault removed it.
    _count(faults, 0, mine & ~good)
    good = tl.abs(gain) < float("inf")
    usable = usable & good
    _count(faults, 1, mine & ~good)
    sampled_by = policy
    trained_at = policy
    if behavior is not None:
        sampled_by = tl.load(behavior + rows, mask=here, other=0.0).to(tl.float64)
        if READS_BEHAVIOR:
            good = _possible(sampled_by, LARGEST)
            usable = usable & good
            _count(faults, 2, mine & ~good)
    if proximal is not None:
        trained_at = tl.load(proximal + rows, mask=here, other=0.0).to(tl.float64)
        if READS_PROXIMAL:
            good = _possible(trained_at, LARGEST)
            usable = usable & good
            _count(faults, 3, mine & ~good)
    anchor = sampled_by if FROM_BEHAVIOR else trained_at
    if sound is not None:
        good = tl.load(sound + rows, mask=here, other=0) != 0
        usable = usable & good
        _count(faults, 4, mine & ~good)
    if ids is not None:
        usable = _sum_columns(
            ids, valid, anchor_columns, own_columns, tokens, anchor_tail, own_tail, out + 6 * n, faults, rows, here,
            mine, usable, policy, anchor, n, width, LARGEST, NOISE, MASS_COARSE, MASS_FINE, LEFT_OUT, NO_TAIL, ROWS,
            COLUMNS,
        )  # fmt: skip
    tl.store(out + rows, tl.where(usable, tl.minimum(policy, 0.0), 0.0), mask=here)
    tl.store(out + n + rows, tl.where(usable, tl.minimum(anchor, 0.0), 0.0), mask=here)
    tl.store(out + 2 * n + rows, tl.where(usable, policy - anchor, 0.0), mask=here)
    tl.store(out + 3 * n + rows, tl.where(usable, gain, 0.0), mask=here)
    if (behavior is not None) and (proximal is not None):
        both = usable & _possible(sampled_by, LARGEST) & _possible(trained_at, LARGEST)
        mismatch = tl.where(both, trained_at - sampled_by, tl.where(usable, float("nan"), 0.0))
        tl.store(out + 4 * n + rows, mismatch, mask=here)
    if version is not None:
        age = (trained_version - tl.load(version + rows, mask=here, other=0)).to(tl.float64)
        tl.store(out + 5 * n + rows, tl.where(usable, age, 0.0), mask=here)
    tl.store(blanked + rows, tl.where(usable, policy, 0.0).to(blanked.dtype.element_ty), mask=here)
    tl.store(usable_out + rows, usable, mask=here)


@jit
def _sum_columns(
    ids, valid, anchor_columns, own_columns, tokens, anchor_tail, own_tail, out, faults, rows, here, mine, usable,
    policy, anchor, n, width, LARGEST: tl.constexpr, NOISE: tl.constexpr, MASS_COARSE: tl.constexpr,
    MASS_FINE: tl.constexpr, LEFT_OUT: tl.constexpr, NO_TAIL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns the tokens that are still usable, after sums over their columns are stored and faults counted."""
    column = tl.arange(0, COLUMNS)
    # 64-bit offsets: tokens times columns may exceed 2³¹.
    place = rows.to(tl.int64)[:, None] * width + column[None, :]
    inside = here[:, None] & (column < width)[None, :]
    token = tl.load(tokens + rows, mask=here, other=-1)
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
    # Terms b log(b/p) − b + p are never below 0, so their sum does not cancel.
    kl = tl.where(b > 0, b * (log_b - tl.where(b > 0, log_p, 0.0)), 0.0) - b + p
    left_out = 1.0 - tl.exp(anchor) - mass_b
    # Rounded log-probs may add up to more than 1.
    tail_b = tl.maximum(left_out, 0.0)
    tail_p = tl.maximum(1.0 - tl.exp(policy) - mass_p, 0.0)
    all_b = mass_b + tl.exp(tl.where(has_token, token_b, anchor - NOISE))
    all_p = mass_p + tl.exp(policy)
    if anchor_tail is not None:
        log_tail_b = tl.load(anchor_tail + rows, mask=here, other=0.0).to(tl.float64)
        log_tail_p = tl.load(own_tail + rows, mask=here, other=0.0).to(tl.float64)
        support = support & _at_most(log_tail_b, LARGEST) & _at_most(log_tail_p, LARGEST)
        tail_b = tl.exp(log_tail_b)
        tail_p = tl.exp(log_tail_p)
        all_b += tail_b
        all_p += tail_p
    judged = usable & support
    fits = _at_most_either(all_b, _all_coarse(log_b), MASS_COARSE, MASS_FINE)
    fits = fits & _at_most_either(all_p, _all_coarse(log_p), MASS_COARSE, MASS_FINE)
    same = ~has_token | _same(token_p, policy, LARGEST)
    _count(faults, 4, mine & ~support)
    _count(faults, 5, mine & judged & ~fits)
    _count(faults, 6, mine & judged & ~same)
    if LEFT_OUT is not None:
        enough = _at_most(left_out, LEFT_OUT)
        _count(faults, 7, mine & judged & ~enough)
        judged = judged & enough
    usable = judged & fits & same
    has_tail = usable & (not NO_TAIL)
    tl.store(out + rows, tl.where(has_tail, tail_b, 0.0), mask=here)
    tl.store(out + n + rows, tl.where(has_tail, tail_p, 0.0), mask=here)
    tl.store(out + 2 * n + rows, tl.where(usable, tl.sum(tl.abs(b - p), 1), 0.0), mask=here)
    tl.store(out + 3 * n + rows, tl.where(usable, tl.sum(kl, 1), 0.0), mask=here)
    return usable


@jit
def terms_kernel(
    logp, keep, weight, advantage, usable, value, penalty, weights, slope, overflow, partials, n,
    LARGEST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes each token's ∂loss/∂log π̃, flags terms that are not finite, and sums the loss of a block."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < n
    gain = tl.load(advantage + rows, mask=here, other=0.0).to(tl.float64)
    kept = (tl.load(keep + rows, mask=here, other=0) != 0) & (gain != 0)
    factor = tl.where(kept, tl.load(weight + rows, mask=here, other=0.0).to(tl.float64), 0.0) * gain
    own = tl.load(logp + rows, mask=here, other=0.0).to(tl.float64)
    if value is None:
        size = factor * own
    else:
        size = tl.where(gain != 0, tl.load(value + rows, mask=here, other=0.0).to(tl.float64), 0.0)
    finite = _at_most(tl.abs(factor), LARGEST) & _at_most(tl.abs(size), LARGEST)
    extra = tl.zeros_like(gain)
    if penalty is not None:
        extra = tl.load(penalty + rows, mask=here, other=0.0).to(tl.float64)
        finite = finite & _at_most(tl.abs(extra), LARGEST)
    mine = tl.load(usable + rows, mask=here, other=0) != 0
    active = mine & finite
    tl.store(overflow + rows, mine & ~finite, mask=here)
    share = tl.full((ROWS,), 1.0, tl.float64)
    if weights is not None:
        share = tl.where(mine, tl.load(weights + rows, mask=here, other=0.0).to(tl.float64), 0.0)
    term = tl.where(active, extra - size, 0.0) * share
    tl.store(slope + rows, (tl.where(active, -factor, 0.0) * share).to(slope.dtype.element_ty), mask=here)
    # One sum per block and no atomics: a sum of fractions depends on the order.
    tl.store(partials + tl.program_id(0), tl.sum(term, 0))


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
def _all_coarse(x):
    return tl.min(_coarse(x).to(tl.int32), 1) > 0


@jit
def _same(column, logp, LARGEST: tl.constexpr):
    """Compares two records of one log-prob, each rounded once."""
    slack = tl.where(_coarse(column) | _coarse(logp), 2.0**-7, 2.0**-23).to(tl.float64) * tl.abs(logp)
    return tl.abs(column - logp) <= slack + tl.full(logp.shape, LARGEST, tl.float64)


@jit
def _count(counters, place, flags):
    """Adds the number of flags to a counter. The sum of whole numbers does not depend on the order."""
    tl.atomic_add(counters + place, tl.sum(flags.to(tl.float64), 0))


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

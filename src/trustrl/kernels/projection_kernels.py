"""Triton device functions of `projection_pass`: TROLL's projection of each token, and its gradient.

A token's distribution has three parts: the recorded columns [rows, columns], the sampled token and the tail [rows].
Everything is in float64. The solver stops for a block when its last token has converged; nobody waits for it.
"""
# The bodies are Triton's language, whose values have no Python types; `triton` itself may not be installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingImports=false

import triton.language as tl

from trustrl.kernels.triton_launch import jit

FLOOR = tl.constexpr(-1000.0)
"""Smallest log-prob used: −inf on either side would make KL NaN."""


@jit
def project_kernel(
    logp, log_policy, log_anchor, log_ratio, usable, ids, valid, anchor_columns, own_columns, tokens, anchor_tail,
    own_tail, bound, alpha, tolerance, out, outside_out, active_out, projected, pull_out, n, width,
    SLACK: tl.constexpr, TAIL_FLOOR: tl.constexpr, EVALUATIONS: tl.constexpr, NO_TAIL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Projects the tokens of one block that are outside the ball."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < n
    on = tl.load(usable + rows, mask=here, other=0) != 0
    ball = tl.load(bound)
    edge = ball * (1.0 + SLACK)
    own = tl.load(log_policy + rows, mask=here, other=0.0)
    anchor = tl.load(log_anchor + rows, mask=here, other=0.0)
    tail_p = tl.load(own_tail + rows, mask=here, other=0.0)
    tail_b = tl.load(anchor_tail + rows, mask=here, other=0.0)
    x, y = _cells(ids, valid, anchor_columns, own_columns, tokens, rows, on, here, width, ROWS, COLUMNS)
    # A tail of 0 would have an infinite log, and the KL would be NaN.
    x_tail = tl.log(_at_least(tail_p, TAIL_FLOOR))
    y_tail = tl.log(_at_least(tail_b, TAIL_FLOOR))
    u, u_own, u_tail = _normalized(x, own, x_tail)
    v, v_own, v_tail = _normalized(y, anchor, y_tail)
    kl_before = _distance(x, y, own, anchor, x_tail, y_tail)
    kl_before = tl.where(on, kl_before, 0.0)
    outside = on & (kl_before > edge)
    log_b, d = _path(u, v)
    b_own, d_own = _path(u_own, v_own)
    b_tail, d_tail = _path(u_tail, v_tail)
    kl_at_one = tl.sum(tl.exp(u) * d, 1) + tl.exp(u_own) * d_own + tl.exp(u_tail) * d_tail
    active = outside & (kl_at_one > edge)

    beta, spent, done = _solve(
        log_b, b_own, b_tail, d, d_own, d_tail, kl_at_one, active, ball, tl.load(tolerance), EVALUATIONS
    )
    kl_after, _, log_norm = _kl_along(log_b, b_own, b_tail, d, d_own, d_tail, beta)
    at_token = tl.where(active, b_own + beta * d_own - log_norm, u_own)
    pull = _pull(u, log_b + beta[:, None] * d - log_norm[:, None])
    pull += _pull_one(u_own, b_own + beta * d_own - log_norm) + _pull_one(u_tail, b_tail + beta * d_tail - log_norm)
    normalized = on if NO_TAIL else outside  # a selection without a tail holds less than a mass of 1
    # With a tail the cells hold a mass of 1: b needs no normalization, and `anchor` keeps the kernel from spilling.
    log_weight = tl.where(
        normalized, at_token - (b_own if NO_TAIL else anchor), tl.load(log_ratio + rows, mask=here, other=0.0)
    )
    unprojected = tl.load(logp + rows, mask=here, other=0.0).to(tl.float64)
    chosen = tl.where(normalized, at_token, unprojected)
    tl.store(projected + rows, chosen.to(projected.dtype.element_ty), mask=here)
    pulled = tl.where(active, tl.load(alpha) * pull, 0.0)
    tl.store(pull_out + rows, pulled.to(pull_out.dtype.element_ty), mask=here)
    tl.store(outside_out + rows, outside, mask=here)
    tl.store(active_out + rows, active, mask=here)
    tl.store(out + rows, log_weight, mask=here)
    tl.store(out + n + rows, kl_before, mask=here)
    tl.store(out + 2 * n + rows, tl.where(active, kl_after, tl.where(outside, kl_at_one, kl_before)), mask=here)
    tl.store(out + 3 * n + rows, tl.where(outside, beta, 0.0), mask=here)
    tl.store(out + 4 * n + rows, tl.where(outside, spent, 0.0), mask=here)
    tl.store(out + 5 * n + rows, tl.where(active & ~done, 1.0, 0.0), mask=here)


@jit
def project_backward_kernel(
    logp, log_policy, log_anchor, usable, ids, valid, anchor_columns, own_columns, tokens, anchor_tail, own_tail, alpha,
    beta_in, outside_in, active_in, d_projected, d_pull, d_logp, d_own_columns, d_own_tail, n, width,
    TAIL_FLOOR: tl.constexpr, BY_SUBTRACTION: tl.constexpr, NO_TAIL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes the gradients with respect to the sampled token's log-prob, the columns and the tail."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < n
    on = tl.load(usable + rows, mask=here, other=0) != 0
    outside = tl.load(outside_in + rows, mask=here, other=0) != 0
    active = tl.load(active_in + rows, mask=here, other=0) != 0
    g_token = tl.load(d_projected + rows, mask=here, other=0.0).to(tl.float64)
    g_pull = tl.where(outside, tl.load(d_pull + rows, mask=here, other=0.0).to(tl.float64) * tl.load(alpha), 0.0)
    own = tl.load(log_policy + rows, mask=here, other=0.0)
    anchor = tl.load(log_anchor + rows, mask=here, other=0.0)
    tail_p = tl.load(own_tail + rows, mask=here, other=0.0)
    tail_b = tl.load(anchor_tail + rows, mask=here, other=0.0)
    beta = tl.load(beta_in + rows, mask=here, other=1.0)
    beta = tl.where(active, beta, 1.0)
    x, y = _cells(ids, valid, anchor_columns, own_columns, tokens, rows, on, here, width, ROWS, COLUMNS)
    u, u_own, u_tail = _normalized(x, own, tl.log(_at_least(tail_p, TAIL_FLOOR)))
    v, v_own, v_tail = _normalized(y, anchor, tl.log(_at_least(tail_b, TAIL_FLOOR)))
    log_b, d = _path(u, v)
    b_own, d_own = _path(u_own, v_own)
    b_tail, d_tail = _path(u_tail, v_tail)
    _, _, log_norm = _kl_along(log_b, b_own, b_tail, d, d_own, d_tail, beta)
    stays = ~active[:, None]
    log_q = tl.where(stays, u, log_b + beta[:, None] * d - log_norm[:, None])
    log_q_own = tl.where(active, b_own + beta * d_own - log_norm, u_own)
    log_q_tail = tl.where(active, b_tail + beta * d_tail - log_norm, u_tail)
    q = tl.exp(log_q)
    q_own = tl.exp(log_q_own)
    q_tail = tl.exp(log_q_tail)

    g, g_own, g_tail = _through_projection(q, q_own, q_tail, d, d_own, d_tail, beta, active, g_token)
    p = tl.exp(u)
    p_own = tl.exp(u_own)
    p_tail = tl.exp(u_tail)
    g += p * tl.where(p > 0, _gap(u, log_q) + 1.0, 0.0) * g_pull[:, None]
    g_own += p_own * tl.where(p_own > 0, _gap(u_own, log_q_own) + 1.0, 0.0) * g_pull
    g_tail += p_tail * tl.where(p_tail > 0, _gap(u_tail, log_q_tail) + 1.0, 0.0) * g_pull
    # Back through the normalization of π: adding a constant to all cells changes nothing, so the sum must be 0.
    total = tl.sum(g, 1) + g_own + g_tail
    g = g - p * total[:, None]
    raw_logp = tl.load(logp + rows, mask=here, other=0.0)
    g_own = tl.where(raw_logp <= 0.0, g_own - p_own * total, 0.0)  # a log-prob above 0 is rounding and was clamped
    g_tail = tl.where(tail_p >= tl.full((ROWS,), TAIL_FLOOR, tl.float64), g_tail - p_tail * total, 0.0)
    if BY_SUBTRACTION:  # tail = 1 − π(a) − Σ π over the columns
        per_mass = g_tail / _at_least(tail_p, TAIL_FLOOR)
        g = g - tl.exp(x) * per_mass[:, None]
        g_own = g_own - tl.exp(own) * per_mass
    column = tl.arange(0, COLUMNS)
    place = rows.to(tl.int64)[:, None] * width + column[None, :]
    inside = here[:, None] & (column < width)[None, :]
    normalized = on if NO_TAIL else outside
    g = tl.where(normalized[:, None] & (x > -float("inf")), g, 0.0).to(tl.float32)
    tl.store(d_own_columns + place, g.to(d_own_columns.dtype.element_ty), mask=inside)
    tl.store(d_logp + rows, tl.where(normalized, g_own, g_token).to(d_logp.dtype.element_ty), mask=here)
    if d_own_tail is not None:
        tl.store(
            d_own_tail + rows, tl.where(outside, g_tail, 0.0).to(tl.float32).to(d_own_tail.dtype.element_ty), mask=here
        )


@jit
def _through_projection(q, q_own, q_tail, d, d_own, d_tail, beta, active, g_token):
    """Returns the gradient with respect to log π of every cell, before the normalization."""
    # Only the sampled token's projected log-prob has a gradient: Σg = g_token.
    mean = tl.sum(q * d, 1) + q_own * d_own + q_tail * d_tail
    off = d - mean[:, None]
    off_own = d_own - mean
    off_tail = d_tail - mean
    spread = tl.sum(q * off * off, 1) + q_own * off_own * off_own + q_tail * off_tail * off_tail
    level = -q * g_token[:, None]
    level_own = g_token - q_own * g_token
    level_tail = -q_tail * g_token
    along = tl.sum(level * off, 1) + level_own * off_own + level_tail * off_tail
    along = along / tl.maximum(spread, 2.2250738585072014e-308)
    g = tl.where(~active[:, None], level, beta[:, None] * (level - along[:, None] * q * off))
    g_own = tl.where(active, beta * (level_own - along * q_own * off_own), level_own)
    g_tail = tl.where(active, beta * (level_tail - along * q_tail * off_tail), level_tail)
    return g, g_own, g_tail


@jit
def _solve(log_b, b_own, b_tail, d, d_own, d_tail, kl_at_one, active, ball, tolerance, EVALUATIONS: tl.constexpr):
    """Solves KL(β) = ball on active rows. Returns β (1 on the others), the evaluations used and the converged rows."""
    # √KL(β) is almost linear in β, so this start is close, and Newton's method on √KL takes few evaluations.
    beta = tl.where(active, tl.sqrt(ball / tl.maximum(kl_at_one, ball)), 1.0)
    low = tl.zeros_like(beta)
    high = tl.full(kl_at_one.shape, 1.0, tl.float64)
    spent = tl.zeros_like(beta)
    done = ~active
    step = 0
    while (step < EVALUATIONS) & (tl.min(done.to(tl.int32), 0) == 0):
        kl, variance, _ = _kl_along(log_b, b_own, b_tail, d, d_own, d_tail, beta)
        spent += tl.where(done, 0.0, 1.0)
        low = tl.where(~done & (kl < ball), beta, low)
        high = tl.where(~done & (kl >= ball), beta, high)
        distance = tl.sqrt(tl.maximum(kl, 0.0))
        # The smallest normal float64: where d hardly varies, it is divided by this and not by 0.
        slope = tl.maximum(beta * variance, 2.2250738585072014e-308)
        newton = beta + (tl.sqrt(ball) - distance) * 2.0 * distance / slope
        # [low, high] brackets the solution. Where Newton's method would leave it or start from a KL near 0, bisect.
        trusted = (newton > low) & (newton < high) & (kl > 0.02 * ball)
        reached = tl.abs(kl - ball) <= tolerance
        moved = tl.where(trusted, newton, tl.where(reached, beta, 0.5 * (low + high)))
        beta = tl.where(done, beta, moved)
        done = done | reached
        step += 1
    # `low` is inside the ball, so a token that did not converge is projected too far and never too little.
    return tl.where(done, beta, low), spent, done


@jit
def _cells(
    ids, valid, anchor_columns, own_columns, tokens, rows, on, here, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Returns log π and log b of the columns; −inf where a column has no cell."""
    column = tl.arange(0, COLUMNS)
    place = rows.to(tl.int64)[:, None] * width + column[None, :]
    inside = here[:, None] & (column < width)[None, :]
    # The sampled token is a separate part. A column with its id would count it twice.
    token = tl.load(tokens + rows, mask=here, other=-1)
    known = (tl.load(valid + place, mask=inside, other=0) != 0) & on[:, None]
    known = known & (tl.load(ids + place, mask=inside, other=-1) != token[:, None])
    x = tl.load(own_columns + place, mask=inside, other=0.0).to(tl.float64)
    y = tl.load(anchor_columns + place, mask=inside, other=0.0).to(tl.float64)
    return tl.where(known, x, -float("inf")), tl.where(known, y, -float("inf"))


@jit
def _normalized(x, own, tail):
    """Returns the three parts minus their log-sum-exp."""
    top = tl.maximum(tl.max(x, 1), tl.maximum(own, tail))
    total = tl.sum(tl.exp(x - top[:, None]), 1) + tl.exp(own - top) + tl.exp(tail - top)
    norm = top + tl.log(total)
    return x - norm[:, None], own - norm, tail - norm


@jit
def _distance(x, y, own, anchor, x_tail, y_tail):
    """Returns KL(π‖b) over the cells, both sides normalized."""
    p = tl.exp(x)
    p_own = tl.exp(own)
    p_tail = tl.exp(x_tail)
    gap = tl.maximum(x, FLOOR) - tl.maximum(y, FLOOR)
    cross = tl.sum(p * gap, 1) + p_own * (own - anchor) + p_tail * (x_tail - y_tail)
    mass_p = tl.sum(p, 1) + p_own + p_tail
    mass_b = tl.sum(tl.exp(y), 1) + tl.exp(anchor) + tl.exp(y_tail)
    return cross / mass_p - tl.log(mass_p) + tl.log(mass_b)


@jit
def _path(u, v):
    """Returns (log b, d) without infinities, except log b = −inf where neither side has the cell."""
    known = (u > -float("inf")) | (v > -float("inf"))
    low = tl.maximum(v, FLOOR)
    return tl.where(known, low, -float("inf")), tl.where(known, tl.maximum(u, FLOOR) - low, 0.0)


@jit
def _kl_along(log_b, b_own, b_tail, d, d_own, d_tail, beta):
    """Returns KL(π̂_β‖b), Var_β(d) and the log of the normalizer."""
    tilted = log_b + beta[:, None] * d
    own = b_own + beta * d_own
    tail = b_tail + beta * d_tail
    top = tl.maximum(tl.max(tilted, 1), tl.maximum(own, tail))
    total = tl.sum(tl.exp(tilted - top[:, None]), 1) + tl.exp(own - top) + tl.exp(tail - top)
    norm = top + tl.log(total)
    q = tl.exp(tilted - norm[:, None])
    q_own = tl.exp(own - norm)
    q_tail = tl.exp(tail - norm)
    mean = tl.sum(q * d, 1) + q_own * d_own + q_tail * d_tail
    off = d - mean[:, None]
    variance = tl.sum(q * off * off, 1)
    variance += q_own * (d_own - mean) * (d_own - mean) + q_tail * (d_tail - mean) * (d_tail - mean)
    return beta * mean - norm, variance, norm


@jit
def _gap(u, log_q):
    return tl.where(u > -float("inf"), u - log_q, 0.0)


@jit
def _pull(u, log_q):
    """Returns Σ π (log π − log π̂) over the columns."""
    return tl.sum(_pull_one(u, log_q), 1)


@jit
def _pull_one(u, log_q):
    return tl.where(u > -float("inf"), tl.exp(u) * _gap(u, log_q), 0.0)


@jit
def _at_least(x, FLOOR_OF_X: tl.constexpr):
    return tl.maximum(x, tl.full(x.shape, FLOOR_OF_X, tl.float64))

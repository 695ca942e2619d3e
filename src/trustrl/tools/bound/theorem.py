r"""Improvement bound for sequences of at most T tokens without discount, with a reward R(y) for the whole sequence.

    J(π) − J(μ) = L′ − Δ ≥ L′ − min( 2ξT(T−1)·D²_max,  4ξ·D_sum )

    L′ = E_μ[ R Σ_t (r_t − 1) ],   r_t = π/μ at token t,   ξ ≥ |R|
    D_max = the largest TV(μ‖π) of all states,   D_sum = E_μ[ Σ_t TV_t ]

The expectations are over y ~ μ, and π is 0 where μ is. docs/concepts/reductions.md has the assumptions.

Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, theorems 3.1 and 3.2.
"""

import math


def max_form(xi: float, horizon: int, max_tv: float) -> float:
    """Returns the penalty 2ξT(T−1)·D²_max.

    Example:
        >>> max_form(1.0, horizon=4, max_tv=0.1)
        0.24000000000000005
    """
    return 2 * xi * horizon * (horizon - 1) * max_tv**2


def sum_form(xi: float, sum_tv: float) -> float:
    """Returns the penalty 4ξ·D_sum, with D_sum the expected sum of the TVs of a sequence.

    Example:
        >>> sum_form(1.0, sum_tv=0.05)
        0.2
    """
    return 4 * xi * sum_tv


def largest_max_tv(surrogate: float, xi: float, horizon: int) -> float | None:
    """Returns the D_max at which L′ equals the max form, at most 1; None if L′ ≤ 0, where no D_max suffices."""
    if not surrogate > 0:
        return None
    scale = max_form(xi, horizon, 1.0)
    return math.sqrt(surrogate / scale) if scale > surrogate else 1.0


def largest_sum_tv(surrogate: float, xi: float) -> float | None:
    """Returns the D_sum at which L′ equals the sum form; None if L′ ≤ 0, where no D_sum suffices."""
    return surrogate / sum_form(xi, 1.0) if surrogate > 0 else None

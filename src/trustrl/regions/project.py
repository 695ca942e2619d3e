r"""TROLL's projection: the closest distribution to π inside a KL ball around the anchor b, differentiably.

    π̂ = argmin_q KL(q‖π)  s.t.  KL(q‖b) ≤ ε
    log π̂ = log b + β d − A(β),   d = log π − log b,   A(β) = log Σ exp(log b + β d),   β ∈ (0, 1]

The solution is a geometric path from b (β = 0) to π (β = 1), so one number per token is sought: KL(β) = β E_β[d] − A(β)
rises from 0 with slope β Var_β(d), and √KL is almost straight in β. Newton on √KL needs 3 evaluations at the median.

Reference: TROLL: Trust Regions improve Reinforcement Learning for Large Language Models, arXiv:2510.03817.

Cost per token and evaluation: one exponential and four multiply-adds per cell. On CPU only the tokens outside the ball
are iterated; on an accelerator all are, a fixed number of times, because counting them would wait for the device.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from trustrl.numerics import free_to_look

MAX_EVALUATIONS = 32
SLACK = 1e-4
"""A token is outside only if its KL exceeds ε by this share: rounding must not project what is on the boundary."""

FLOOR = -1000.0
"""Log-probs below this are treated as this: a −inf on either side would make KL NaN and the token silently inactive."""


class Projection(NamedTuple):
    """The projected distribution and how it was found."""

    log_projected: Float[Tensor, "n c"]
    """log π̂ per cell, with gradient to log π."""

    active: Bool[Tensor, " n"]
    """True where π was outside the ball."""

    kl_before: Float[Tensor, " n"]
    """KL(π‖b)."""

    kl_after: Float[Tensor, " n"]
    """KL(π̂‖b)."""

    beta: Float[Tensor, " n"]
    """1 inside the ball; the smaller, the harder the token was pulled back."""

    evaluations: Float[Tensor, " n"]
    """How many times KL(β) was evaluated to find β; 0 inside the ball."""

    converged: Bool[Tensor, " n"]
    """False where the evaluations ran out; the result is then inside the ball, not on its edge."""


def project(log_policy: Float[Tensor, "n c"], log_anchor: Float[Tensor, "n c"], *, bound: float) -> Projection:
    """Projects each row of π onto the ball KL(·‖b) ≤ bound.

    Args:
        log_policy: Normalised log π over cells, with gradient. −inf on both sides marks a column without a cell.
        log_anchor: Normalised log b over the same cells.
        bound: ε in nats.

    Returns:
        The projection; `log_projected` equals `log_policy` exactly where the row was inside.
    """
    log_projected, beta, kl_before, kl_after, evaluations, converged = _Project.apply(log_policy, log_anchor, bound)  # type: ignore[misc]
    return Projection(log_projected, kl_before > bound * (1 + SLACK), kl_before, kl_after, beta, evaluations, converged)


class _Project(Function):
    """The projection with its closed-form backward (implicit function theorem); nothing is differentiated through."""

    @staticmethod
    def forward(ctx: Any, log_policy: Tensor, log_anchor: Tensor, bound: float) -> tuple[Tensor, ...]:
        log_b, d = path(log_policy, log_anchor)
        kl_before = (torch.exp(log_policy) * d).sum(-1)  # KL at β = 1: π is normalised
        active = kl_before > bound * (1 + SLACK)
        beta, evaluations, converged = solve_beta(log_b, d, kl_before, active, bound)
        log_projected = log_b + beta.unsqueeze(-1) * d
        log_projected = log_projected - torch.logsumexp(log_projected, dim=-1, keepdim=True)
        log_projected = torch.where(active.unsqueeze(-1), log_projected, log_policy)
        kl_after = torch.where(active, kl_along(log_b, d, beta)[0], kl_before)
        ctx.save_for_backward(log_projected, d, beta, active)
        ctx.mark_non_differentiable(beta, kl_before, kl_after, evaluations, converged)
        return log_projected, beta, kl_before, kl_after, evaluations, converged

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, g: Tensor, *unused: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        r"""∂L/∂log π_j = β [g_j − π̂_j Σg − c π̂_j (d_j − E d)],  c = Σ_i g_i (d_i − E d) / Var(d);  moments under π̂.

        Inside the ball only the normalisation remains: g_j − π_j Σg.
        """
        log_projected, d, beta, active = ctx.saved_tensors  # type: ignore[attr-defined]
        projected = torch.exp(log_projected)
        normalised = g - projected * g.sum(-1, keepdim=True)
        centred = d - (projected * d).sum(-1, keepdim=True)
        variance = (projected * centred.square()).sum(-1, keepdim=True).clamp(min=torch.finfo(d.dtype).tiny)
        # Σ g (d − E d) without the part Σg that cancels against the mean: centred again, so rounding stays relative.
        along = (normalised * centred).sum(-1, keepdim=True) / variance
        pulled_back = beta.unsqueeze(-1) * (normalised - along * projected * centred)
        return torch.where(active.unsqueeze(-1), pulled_back, normalised), None, None


def path(log_policy: Tensor, log_anchor: Tensor) -> tuple[Tensor, Tensor]:
    """(log b, d) with every infinity removed: floored where one side knows the cell, empty where neither does."""
    known = (log_anchor > -torch.inf) | (log_policy > -torch.inf)
    d = torch.where(known, log_policy.clamp(min=FLOOR) - log_anchor.clamp(min=FLOOR), 0.0)
    return torch.where(known, log_anchor.clamp(min=FLOOR), -torch.inf), d


def kl_along(log_b: Tensor, d: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(π̂_β‖b) with E_β[d] and Var_β(d)."""
    tilted = log_b + beta.unsqueeze(-1) * d
    log_norm = torch.logsumexp(tilted, dim=-1)
    q = torch.exp(tilted - log_norm.unsqueeze(-1))
    mean = (q * d).sum(-1)
    variance = (q * (d - mean.unsqueeze(-1)).square()).sum(-1)
    return beta * mean - log_norm, mean, variance


def solve_beta(
    log_b: Tensor, d: Tensor, kl_before: Tensor, active: Tensor, bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    """β with KL(β) = bound for the active rows, 1 for the others; evaluations spent; whether the root was reached."""
    looking = free_to_look(active)
    rows = active.nonzero().squeeze(-1) if looking else torch.arange(active.shape[0], device=active.device)
    log_b, d, kl_before, sought = log_b[rows], d[rows], kl_before[rows], active[rows]

    tolerance = min(1e-6, 0.5 * SLACK * bound)
    root = bound**0.5
    low, high = torch.zeros_like(kl_before), torch.ones_like(kl_before)
    beta = torch.where(sought, (bound / kl_before.clamp(min=bound)).sqrt(), 1.0)
    done = ~sought
    evaluations = torch.zeros_like(beta)
    for _ in range(MAX_EVALUATIONS):
        kl, _, variance = kl_along(log_b, d, beta)
        evaluations = evaluations + (~done).to(beta.dtype)
        low = torch.where(~done & (kl < bound), beta, low)
        high = torch.where(~done & (kl >= bound), beta, high)
        distance = kl.clamp(min=0.0).sqrt()
        newton = beta + (root - distance) * 2 * distance / (beta * variance).clamp(min=torch.finfo(beta.dtype).tiny)
        # Near KL = 0 the root's slope is all rounding, so Newton would creep: halve the bracket instead.
        trusted = (newton > low) & (newton < high) & (kl > 0.02 * bound)
        reached = (kl - bound).abs() <= tolerance
        # A token that just arrived takes one last Newton step for free: it squares what error is left.
        moved = torch.where(trusted, newton, torch.where(reached, beta, 0.5 * (low + high)))
        beta = torch.where(done, beta, moved)
        done = done | reached
        if looking and bool(done.all()):
            break
    # Out of evaluations: the bracket's lower end is inside the ball.
    beta = torch.where(done, beta, low)
    full = torch.ones_like(active, dtype=beta.dtype)
    spent = torch.zeros_like(full)
    reached = torch.ones_like(active)
    return full.index_copy(0, rows, beta), spent.index_copy(0, rows, evaluations), reached.index_copy(0, rows, done)

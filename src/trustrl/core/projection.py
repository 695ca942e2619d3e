r"""Projection of each token's distribution onto a KL ball around the anchor b, differentiably.

    π̂ = argmin_q KL(q‖π)  s.t.  KL(q‖b) ≤ ε
    log π̂ = log b + β d − A(β),   d = log π − log b,   A(β) = log Σ exp(log b + β d),   β ∈ (0, 1]

All three distributions are normalized over the same cells before they are divided. With a bucket for the rest, the
cells hold a mass of 1 and π(a)/b(a) inside the ball needs no normalization. A selection without a bucket does.

The solution lies on a geometric path from b (β = 0) to π (β = 1), so the solver seeks one number per token.
KL(β) = β E_β[d] − A(β) rises from 0 with slope β Var_β(d), and √KL is almost linear in β. Newton on √KL takes 3
evaluations at the median.

Reference: TROLL: Trust Regions improve Reinforcement Learning for Large Language Models, arXiv:2510.03817.

Cost per token and evaluation: one exponential and four multiply-adds per cell. On CPU the solver iterates only the
tokens outside the ball. On an accelerator it iterates all of them a fixed number of times, because counting them would
wait for the device.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import Function

from trustrl.core.clean import CleanTokens
from trustrl.core.numerics import free_to_look
from trustrl.core.partition import CellSums, Partition
from trustrl.kernels.derivatives import once_differentiable

MAX_EVALUATIONS = 32
SLACK = 1e-4
"""Share by which KL must exceed ε before a token is projected, so that rounding does not project boundary tokens."""

FLOOR = -1000.0
"""Smallest log-prob used: −inf on either side would make KL NaN and the token silently inactive."""


class ProjectedTokens(NamedTuple):
    """The projection of each token, or the token itself inside the ball."""

    logp: Float[Tensor, " n"]
    """log π̂(a), with gradient."""

    pull: Float[Tensor, " n"]
    """α·KL(π‖sg π̂), with gradient; 0 inside."""

    outside: Bool[Tensor, " n"]
    log_weight: Float[Tensor, " n"]
    """log π̂(a) − log b(a), detached. Both are normalized over the cells; see `_by_row`."""

    kl_before: Float[Tensor, " n"]
    kl_after: Float[Tensor, " n"]
    beta: Float[Tensor, " n"]
    """0 inside."""

    evaluations: Float[Tensor, " n"]
    unconverged: Float[Tensor, " n"]

    @property
    def numbers(self) -> dict[str, Tensor]:
        """Numbers of each token for metrics, by name."""
        return {
            "projected": self.outside,
            "projected_kl_before": self.kl_before,
            "projected_kl_after": self.kl_after,
            "projected_beta": self.beta,
            "projected_evaluations": self.evaluations,
            "projected_unconverged": self.unconverged,
        }


def project_tokens(tokens: CleanTokens, *, bound: float, alpha: float, select: bool) -> ProjectedTokens:
    """Projects the tokens outside the ball KL(·‖b) ≤ bound, and pulls the policy towards the projections.

    Args:
        tokens: Clean tokens with their partition.
        bound: ε in nats.
        alpha: Weight of the pull, KL(π‖sg π̂).
        select: True if the cells are a selection without a bucket, so that every token is normalized over them.
    """
    if isinstance(tokens.partition, CellSums):
        return _by_launch(tokens, bound, alpha)
    return _by_row(tokens, bound, alpha, select)


def _by_row(tokens: CleanTokens, bound: float, alpha: float, select: bool) -> ProjectedTokens:
    """Projects with torch operations on the partition's columns.

    Tokens outside the ball read their log-probs from the normalized cells. If the cells are a selection, all tokens do.
    """
    kl_before = _kl_to_anchor(tokens)
    outside_ball = tokens.usable & (kl_before > bound * (1 + SLACK))
    normalized = tokens.usable if select else outside_ball
    # Where reading the mask does not wait for a device, only these tokens are processed.
    rows = normalized.nonzero().squeeze(-1) if free_to_look(kl_before) else None
    log_policy, log_anchor, column = _distributions(tokens, rows)
    projection = troll_project(log_policy, log_anchor, bound=bound)

    projected_logp = projection.log_projected.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    if select:
        anchor_logp = log_anchor.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    else:  # with a bucket, the cells hold a mass of 1
        anchor_logp = tokens.log_anchor if rows is None else tokens.log_anchor[rows]
    gap = torch.where(log_policy > -torch.inf, log_policy - projection.log_projected.detach(), 0.0)
    pull = alpha * (torch.exp(log_policy) * gap).sum(-1)

    def everywhere(x: Tensor, others: Tensor, where: Tensor = outside_ball) -> Tensor:
        """Returns x on the tokens of a mask and `others` elsewhere."""
        x = x.to(others.dtype)
        if rows is not None:
            x = torch.zeros_like(others).index_add(0, rows, x)
        return torch.where(where, x, others)

    none = torch.zeros_like(kl_before)
    return ProjectedTokens(
        logp=everywhere(projected_logp, tokens.logp, normalized),
        pull=everywhere(pull, torch.zeros_like(tokens.logp)),
        outside=outside_ball,
        log_weight=everywhere(projected_logp.detach() - anchor_logp, tokens.log_ratio, normalized),
        kl_before=kl_before,
        kl_after=everywhere(projection.kl_after, kl_before),
        beta=everywhere(projection.beta, none),
        evaluations=everywhere(projection.evaluations, none),
        unconverged=everywhere(~projection.converged, none),
    )


def _by_launch(tokens: CleanTokens, bound: float, alpha: float) -> ProjectedTokens:
    """Projects in one launch, which reads the recorded columns themselves."""
    from trustrl.kernels import projection_pass  # imported on use, because only this path needs triton

    cells = tokens.partition
    assert isinstance(cells, CellSums)
    inputs = projection_pass.ProjectInputs(
        log_policy=tokens.log_policy,
        log_anchor=tokens.log_anchor,
        log_ratio=tokens.log_ratio,
        usable=tokens.usable,
        anchor_tail=cells.anchor_tail,
        policy_tail=cells.policy_tail,
        columns=cells.columns,
    )
    settings = projection_pass.ProjectSettings(
        bound=bound,
        alpha=alpha,
        slack=SLACK,
        tolerance=_tolerance(bound),
        tail_floor=_tail_floor(tokens, cells),
        evaluations=MAX_EVALUATIONS,
    )
    return ProjectedTokens(*projection_pass.project(tokens.logp, inputs, settings))


def _tolerance(bound: float) -> float:
    """Returns the error of KL at which the solver stops."""
    return min(1e-6, 0.5 * SLACK * bound)


def _tail_floor(tokens: CleanTokens, partition: Partition | CellSums) -> float:
    """Returns the smallest tail used on both sides.

    1 − Σ below the rounding of its terms is noise, and must not cause a projection. The floor also keeps the logarithm
    and its gradient finite at an empty tail.
    """
    return max(partition.resolution, torch.finfo(tokens.log_anchor.dtype).tiny)


@torch.no_grad()
def _kl_to_anchor(tokens: CleanTokens) -> Tensor:
    """Returns KL(π‖b) over the cells with both sides normalized; 0 on unusable tokens."""
    partition = tokens.partition
    assert isinstance(partition, Partition)  # among the region's needs
    tail_p, tail_b = (
        x.clamp(min=_tail_floor(tokens, partition)) for x in (partition.policy_tail, partition.anchor_tail)
    )
    gap = partition.log_policy.clamp(min=FLOOR) - partition.log_anchor.clamp(min=FLOOR)
    cross = (partition.policy * gap).sum(-1) + tail_p * (torch.log(tail_p) - torch.log(tail_b))
    mass_p, mass_b = partition.policy.sum(-1) + tail_p, partition.anchor.sum(-1) + tail_b
    if partition.sampled is None:
        own_p, own_b = torch.exp(tokens.log_policy), torch.exp(tokens.log_anchor)
        cross = cross + own_p * (tokens.log_policy - tokens.log_anchor)
        mass_p, mass_b = mass_p + own_p, mass_b + own_b
    return torch.where(tokens.usable, cross / mass_p - torch.log(mass_p) + torch.log(mass_b), 0.0)


def _distributions(tokens: CleanTokens, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns normalized log π and log b over all cells with the tail last, and the sampled token's column."""
    partition = tokens.partition
    assert isinstance(partition, Partition)  # among the region's needs
    floor = _tail_floor(tokens, partition)

    def some(x: Tensor) -> Tensor:
        return x if rows is None else x[rows]

    usable = some(tokens.usable)
    sides: list[Tensor] = []
    for own, known, tail in (
        (tokens.logp.to(tokens.log_policy.dtype), partition.log_policy, partition.policy_tail),
        (tokens.log_anchor, partition.log_anchor, partition.anchor_tail),
    ):
        # Blanked before the logarithm and the softmax: an unusable row has all its mass in the tail, on both sides.
        tail = torch.log(torch.where(usable, some(tail), 1.0).clamp(min=floor)).unsqueeze(-1)
        known = torch.where(usable.unsqueeze(-1), some(known), -torch.inf)
        sampled = [] if partition.sampled is not None else [some(own).clamp(max=0.0).unsqueeze(-1)]
        sides.append(torch.log_softmax(torch.cat([*sampled, known, tail], dim=-1), dim=-1))
    column = torch.zeros_like(usable, dtype=torch.long) if partition.sampled is None else some(partition.sampled)
    return sides[0], sides[1], column


class Projection(NamedTuple):
    """Projected distributions and the solver's results."""

    log_projected: Float[Tensor, "n c"]
    """log π̂ per cell, with gradient to log π."""

    active: Bool[Tensor, " n"]
    """True where π was outside the ball."""

    kl_before: Float[Tensor, " n"]
    """KL(π‖b)."""

    kl_after: Float[Tensor, " n"]
    """KL(π̂‖b)."""

    beta: Float[Tensor, " n"]
    """β: 1 inside the ball, smaller the further the token is pulled back."""

    evaluations: Float[Tensor, " n"]
    """Evaluations of KL(β) that the solver used; 0 inside the ball."""

    converged: Bool[Tensor, " n"]
    """False where the solver ran out of evaluations. The result is then inside the ball, not on its edge."""


def troll_project(log_policy: Float[Tensor, "n c"], log_anchor: Float[Tensor, "n c"], *, bound: float) -> Projection:
    """Projects each row of π onto the ball KL(·‖b) ≤ bound.

    Args:
        log_policy: Normalized log π over cells, with gradient. −inf on both sides marks a column without a cell.
        log_anchor: Normalized log b over the same cells.
        bound: ε in nats.

    Returns:
        The projection. `log_projected` equals `log_policy` exactly on rows inside the ball.
    """
    log_projected, beta, kl_before, kl_after, evaluations, converged = _Project.apply(log_policy, log_anchor, bound)  # type: ignore[misc]
    return Projection(log_projected, kl_before > bound * (1 + SLACK), kl_before, kl_after, beta, evaluations, converged)


class _Project(Function):
    """Projection with a closed-form backward pass (implicit function theorem). Autograd does not see the solver."""

    @staticmethod
    def forward(ctx: Any, log_policy: Tensor, log_anchor: Tensor, bound: float) -> tuple[Tensor, ...]:
        log_b, d = path(log_policy, log_anchor)
        kl_before = (torch.exp(log_policy) * d).sum(-1)  # KL at β = 1, because π is normalized
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
    def backward(ctx: Any, g: Tensor, *unused: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        r"""Returns ∂L/∂log π, with moments under π̂.

            ∂L/∂log π_j = β [g_j − π̂_j Σg − c π̂_j (d_j − E d)],   c = Σ_i g_i (d_i − E d) / Var(d)

        Inside the ball only the normalization remains: g_j − π_j Σg.
        """
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        log_projected, d, beta, active = saved
        projected = torch.exp(log_projected)
        normalized = g - projected * g.sum(-1, keepdim=True)
        centered = d - (projected * d).sum(-1, keepdim=True)
        variance = (projected * centered.square()).sum(-1, keepdim=True).clamp(min=torch.finfo(d.dtype).tiny)
        # Σ g (d − E d) without the part Σg, which cancels against the mean, so that rounding stays relative.
        along = (normalized * centered).sum(-1, keepdim=True) / variance
        pulled_back = beta.unsqueeze(-1) * (normalized - along * projected * centered)
        return torch.where(active.unsqueeze(-1), pulled_back, normalized), None, None


def path(log_policy: Tensor, log_anchor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (log b, d) without infinities: floored where one side has the cell, empty where neither has."""
    known = (log_anchor > -torch.inf) | (log_policy > -torch.inf)
    d = torch.where(known, log_policy.clamp(min=FLOOR) - log_anchor.clamp(min=FLOOR), 0.0)
    return torch.where(known, log_anchor.clamp(min=FLOOR), -torch.inf), d


def kl_along(log_b: Tensor, d: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns KL(π̂_β‖b), E_β[d] and Var_β(d)."""
    tilted = log_b + beta.unsqueeze(-1) * d
    log_norm = torch.logsumexp(tilted, dim=-1)
    q = torch.exp(tilted - log_norm.unsqueeze(-1))
    mean = (q * d).sum(-1)
    variance = (q * (d - mean.unsqueeze(-1)).square()).sum(-1)
    return beta * mean - log_norm, mean, variance


def solve_beta(
    log_b: Tensor, d: Tensor, kl_before: Tensor, active: Tensor, bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Solves KL(β) = bound on active rows. Returns β (1 on the others), the evaluations used and the converged rows."""
    looking = free_to_look(active)
    rows = active.nonzero().squeeze(-1) if looking else torch.arange(active.shape[0], device=active.device)
    log_b, d, kl_before, sought = log_b[rows], d[rows], kl_before[rows], active[rows]

    tolerance = _tolerance(bound)
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
        # Near KL = 0 the slope is dominated by rounding and Newton would stall: halve the bracket instead.
        trusted = (newton > low) & (newton < high) & (kl > 0.02 * bound)
        reached = (kl - bound).abs() <= tolerance
        # A row that has just converged takes one last Newton step, which squares the remaining error.
        moved = torch.where(trusted, newton, torch.where(reached, beta, 0.5 * (low + high)))
        beta = torch.where(done, beta, moved)
        done = done | reached
        if looking and bool(done.all()):
            break
    # Rows without convergence take the bracket's lower end, which is inside the ball.
    beta = torch.where(done, beta, low)
    full = torch.ones_like(active, dtype=beta.dtype)
    spent = torch.zeros_like(full)
    reached = torch.ones_like(active)
    return full.index_copy(0, rows, beta), spent.index_copy(0, rows, evaluations), reached.index_copy(0, rows, done)

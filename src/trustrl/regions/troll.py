"""TROLL's decision: which tokens are outside the ball, their projection, and the pull towards it."""

import torch
from torch import Tensor

from trustrl.cells import Cells
from trustrl.config.regions import TROLL
from trustrl.numerics import free_to_look
from trustrl.regions.correction import corrected
from trustrl.regions.decision import Decision
from trustrl.regions.project import FLOOR, SLACK, project
from trustrl.tokens import Tokens


def decide_troll(tokens: Tokens, region: TROLL) -> Decision:
    r"""TROLL: ℓ = −A·π̂(a)/b(a) + α·KL(π‖sg π̂), on every token, A = 0 included."""
    kl_before = _kl_to_anchor(tokens)
    outside_ball = tokens.usable & (kl_before > region.bound * (1 + SLACK))
    # Where that can be known without waiting for a device, only the tokens outside the ball are worked on.
    rows = outside_ball.nonzero().squeeze(-1) if free_to_look(kl_before) else None
    log_policy, log_anchor, column = _distributions(tokens, rows)
    found = project(log_policy, log_anchor, bound=region.bound)

    at_token = found.log_projected.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    gap = torch.where(log_policy > -torch.inf, log_policy - found.log_projected.detach(), 0.0)
    pull = region.alpha * (torch.exp(log_policy) * gap).sum(-1)

    def everywhere(x: Tensor, inside: Tensor) -> Tensor:
        """x on the tokens outside the ball, `inside` on the others."""
        x = x.to(inside.dtype)
        if rows is not None:
            x = torch.zeros_like(inside).index_add(0, rows, x)
        return torch.where(outside_ball, x, inside)

    logp = everywhere(at_token, tokens.logp)
    weight = torch.exp(everywhere(at_token.detach(), tokens.log_policy) - tokens.log_anchor)
    weight = torch.where(outside_ball, weight, torch.exp(tokens.log_ratio))
    none = torch.zeros_like(kl_before)
    decision = Decision(
        torch.ones_like(tokens.usable),
        weight,
        logp,
        value=weight * tokens.advantage,
        penalty=everywhere(pull, torch.zeros_like(tokens.logp)),
        extra={
            "projected": outside_ball,
            "projected_kl_before": kl_before,
            "projected_kl_after": everywhere(found.kl_after, kl_before),
            "projected_beta": everywhere(found.beta, none),
            "projected_evaluations": everywhere(found.evaluations, none),
            "projected_unconverged": everywhere(~found.converged, none),
        },
    )
    return corrected(tokens, region.correction, decision)


def _tail_floor(tokens: Tokens, cells: Cells) -> float:
    """1 − Σ below the rounding of its terms is noise: floored alike on both sides, it projects nothing.

    The floor also keeps the logarithm and its gradient finite at an empty tail.
    """
    return max(cells.resolution, torch.finfo(tokens.log_anchor.dtype).tiny)


@torch.no_grad()
def _kl_to_anchor(tokens: Tokens) -> Tensor:
    """KL(π‖b) over the cells, both sides normalised; 0 on tokens that are not usable."""
    cells = tokens.cells
    assert cells is not None  # among the region's needs
    tail_p, tail_b = (x.clamp(min=_tail_floor(tokens, cells)) for x in (cells.policy_tail, cells.anchor_tail))
    gap = cells.log_policy.clamp(min=FLOOR) - cells.log_anchor.clamp(min=FLOOR)
    cross = (cells.policy * gap).sum(-1) + tail_p * (torch.log(tail_p) - torch.log(tail_b))
    mass_p, mass_b = cells.policy.sum(-1) + tail_p, cells.anchor.sum(-1) + tail_b
    if cells.sampled is None:
        own_p, own_b = torch.exp(tokens.log_policy), torch.exp(tokens.log_anchor)
        cross = cross + own_p * (tokens.log_policy - tokens.log_anchor)
        mass_p, mass_b = mass_p + own_p, mass_b + own_b
    return torch.where(tokens.usable, cross / mass_p - torch.log(mass_p) + torch.log(mass_b), 0.0)


def _distributions(tokens: Tokens, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """log π and log b over all cells with the tail last, normalised, and the sampled token's column, of these rows."""
    cells = tokens.cells
    assert cells is not None  # among the region's needs
    floor = _tail_floor(tokens, cells)

    def some(x: Tensor) -> Tensor:
        return x if rows is None else x[rows]

    usable = some(tokens.usable)
    sides = []
    for own, known, tail in (
        (tokens.logp.to(tokens.log_policy.dtype), cells.log_policy, cells.policy_tail),
        (tokens.log_anchor, cells.log_anchor, cells.anchor_tail),
    ):
        # Blanked before the logarithm and before the softmax: an unusable row is certain of its tail, on both sides.
        tail = torch.log(torch.where(usable, some(tail), 1.0).clamp(min=floor)).unsqueeze(-1)
        known = torch.where(usable.unsqueeze(-1), some(known), -torch.inf)
        parts = [known, tail] if cells.sampled is not None else [some(own).clamp(max=0.0).unsqueeze(-1), known, tail]
        sides.append(torch.log_softmax(torch.cat(parts, dim=-1), dim=-1))
    column = torch.zeros_like(usable, dtype=torch.long) if cells.sampled is None else some(cells.sampled)
    return sides[0], sides[1], column

r"""DPPO and the symmetric masks: mask a token whose measured divergence exceeds its bound.

    ℓ_t = −M_t · sg(min(r_t, C)) · A_t · log π(a_t),   r = π/b

    DPPO:       M_t = 0  iff  D_t > δ and the update pushes the token further out (`leaving`)
    IPO, KPOP:  M_t = 0  iff  D_t > δ, in either direction (`outside`)

D is the statistic of the region's settings: binary, Top-K or full TV or KL, as an interval. The bound applies to its
lower end unless `act_on="upper"`.

Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 12-16.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config.axes import Direction
from trustrl.config.regions import DPPO, IPO, KPOP
from trustrl.config.statistics import Statistic, TopKTV
from trustrl.core.clean import CleanTokens
from trustrl.core.divergences.interval import Interval
from trustrl.core.divergences.measure import acting_end, measure
from trustrl.core.numerics import either
from trustrl.core.regions.decision import Decision, corrected, weighted


def leaving(
    divergence: Float[Tensor, " n"],
    log_ratio: Float[Tensor, " n"],
    advantage: Float[Tensor, " n"],
    *,
    max_increase: float,
    max_decrease: float,
) -> Bool[Tensor, " n"]:
    r"""Flags tokens that are outside the region and that the update pushes further out.

        (A > 0 and r > 1 and D > max_increase)  or  (A < 0 and r < 1 and D > max_decrease)

    A token outside the region that the update pulls back keeps its gradient. A token with A = 0 has none to mask.

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 12.
    """
    upward = (advantage > 0) & (log_ratio > 0) & (divergence > max_increase)
    downward = (advantage < 0) & (log_ratio < 0) & (divergence > max_decrease)
    return upward | downward


def outside(
    divergence: Float[Tensor, " n"],
    log_ratio: Float[Tensor, " n"],
    *,
    max_increase: float,
    max_decrease: float,
) -> Bool[Tensor, " n"]:
    """Flags tokens outside the bound, regardless of the update's direction. At r = 1 the looser bound applies."""
    no_side = divergence.new_full((), max(max_increase, max_decrease))
    bound = torch.where(log_ratio == 0, no_side, either(log_ratio > 0, max_increase, max_decrease, like=divergence))
    return divergence > bound


def decide_dppo(tokens: CleanTokens, region: DPPO) -> Decision:
    """Masks tokens that leave the divergence ball around the anchor (eq. 12)."""
    decision = mask_tokens(tokens, region.divergence, max_ratio=region.max_ratio)
    return corrected(tokens, region.correction, decision)


def decide_symmetric(tokens: CleanTokens, region: IPO | KPOP) -> Decision:
    """Masks tokens outside the bound in either direction."""
    decision = mask_tokens(tokens, region.divergence, direction="symmetric")
    return corrected(tokens, region.correction, decision)


def decide_ipo(tokens: CleanTokens, region: IPO) -> Decision:
    """Applies the symmetric mask and, if τ > 0, adds the penalty τ·log² r to every token."""
    decision = decide_symmetric(tokens, region)
    if region.log_ratio_penalty == 0:
        return decision
    log_ratio = tokens.logp - tokens.log_anchor.to(tokens.logp.dtype)
    return replace(decision, penalty=region.log_ratio_penalty * log_ratio.square())


def mask_tokens(
    tokens: CleanTokens, statistic: Statistic, *, direction: Direction = "away", max_ratio: float | None = None
) -> Decision:
    """Returns the decision that masks single tokens by a statistic and weights the others by min(r, C)."""
    return mask_by(tokens, measure(tokens, statistic), statistic, direction=direction, max_ratio=max_ratio)


def mask_by(
    tokens: CleanTokens,
    interval: Interval,
    statistic: Statistic,
    *,
    direction: Direction,
    max_ratio: float | None,
    side: Float[Tensor, " n"] | None = None,
    log_weight: Float[Tensor, " n"] | None = None,
) -> Decision:
    """Returns the mask for a distance that is already measured.

    Args:
        tokens: Clean tokens.
        interval: Distance of each token.
        statistic: Statistic whose bounds apply.
        direction: `away` masks only tokens that the update pushes further out; `symmetric` masks all outside.
        max_ratio: Cap on the weight.
        side: Log-ratio whose sign selects the bound; the token's own by default.
        log_weight: Log of the uncapped weight; the token's log-ratio by default.
    """
    max_decrease, max_increase = statistic.bounds
    sign = tokens.log_ratio if side is None else side
    distance = acting_end(interval, statistic)
    if tokens.tightening is not None:
        # A factor on D is a divisor of δ, and 1 leaves fresh tokens as they are.
        distance = distance * tokens.tightening
    bounds = {"max_increase": max_increase, "max_decrease": max_decrease}
    if direction == "symmetric":
        masked = outside(distance, sign, **bounds)
    else:
        masked = leaving(distance, sign, tokens.advantage, **bounds)
    decision = weighted(tokens, masked, tokens.log_ratio if log_weight is None else log_weight, max_ratio)
    narrows = isinstance(statistic, TopKTV)
    return replace(decision, divergence=interval, side=side, narrows_with_k=narrows, **tightened(bounds, tokens))


def tightened(bounds: dict[str, float], tokens: CleanTokens) -> dict[str, Any]:
    """Returns the bounds, one per token if the region tightens those of stale tokens."""
    if tokens.tightening is None:
        return {**bounds}
    return {name: bound / tokens.tightening for name, bound in bounds.items()}

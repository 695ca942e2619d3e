"""Stop a token's gradient when it is outside the region: the edge tests, and the weight of what is kept."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.numerics import either


def leaving(
    divergence: Float[Tensor, " n"],
    log_ratio: Float[Tensor, " n"],
    advantage: Float[Tensor, " n"],
    *,
    max_increase: float,
    max_decrease: float,
) -> Bool[Tensor, " n"]:
    r"""Outside *and* pushed further out: the tokens to stop.

        (A > 0 and r > 1 and D > max_increase)  or  (A < 0 and r < 1 and D > max_decrease)

    A token that has drifted out but is being pulled back keeps its gradient; a token with A = 0 has none to stop.

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
    """Outside, whatever the update would do. At r = 1 exactly, where no side applies, the looser bound does."""
    no_side = divergence.new_full((), max(max_increase, max_decrease))
    bound = torch.where(log_ratio == 0, no_side, either(log_ratio > 0, max_increase, max_decrease, like=divergence))
    return divergence > bound


def ratio_weight(log_ratio: Float[Tensor, " n"], *, max_ratio: float | None) -> Float[Tensor, " n"]:
    """w = exp(min(log r, log C)): capped before the exponential, so that a capped weight never overflows."""
    return torch.exp(log_ratio if max_ratio is None else log_ratio.clamp(max=math.log(max_ratio)))

r"""Regions made of the ratio: PPO's clip, and the objectives that bend instead of cutting.

Each objective comes as its value and its weight w, where ∂objective/∂log π = w·A. `gradcheck` shows that they agree.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from trustrl.numerics import either


def clipped_objective(
    log_ratio: Float[Tensor, " n"],
    advantage: Float[Tensor, " n"],
    *,
    max_increase: float,
    max_decrease: float,
) -> Float[Tensor, " n"]:
    """PPO's textbook value, min(r·A, clip(r, 1 − max_decrease, 1 + max_increase)·A)."""
    ratio = torch.exp(log_ratio)
    return torch.minimum(ratio * advantage, ratio.clamp(1 - max_decrease, 1 + max_increase) * advantage)


def runaway(log_ratio: Float[Tensor, " n"], advantage: Float[Tensor, " n"], *, max_ratio: float) -> Bool[Tensor, " n"]:
    """Dual clip's extra stop: a token being pushed down whose ratio is already above c (A < 0 and r > c)."""
    return (advantage < 0) & (torch.exp(log_ratio) > max_ratio)


def soft_gate(
    log_ratio: Float[Tensor, " n"],
    advantage: Float[Tensor, " n"],
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    r"""SAPO's sigmoid gate, as (weight, objective).

        objective = (4/τ) σ(x) A,   w = 4 r σ(x) σ(−x),   x = τ(r − 1),   τ by the sign of A

    w is formed in logs: r alone may overflow while w goes to 0.

    Reference: Soft Adaptive Policy Optimization, arXiv:2511.20347.
    """
    tau = either(advantage > 0, temperature_positive, temperature_negative, like=log_ratio)
    x = tau * torch.expm1(log_ratio)
    weight = 4 * torch.exp(log_ratio + logsigmoid(x) + logsigmoid(-x))
    return weight, 4 / tau * torch.sigmoid(x) * advantage


def quadratic_penalty(
    log_ratio: Float[Tensor, " n"],
    gap: Float[Tensor, " n"],
    advantage: Float[Tensor, " n"],
    *,
    width: Float[Tensor, " n"] | float,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    r"""An objective that tops out where the signed gap reaches its width, as (weight, objective).

        objective = r A − |A| (r − 1) x / (2·width),   w = r [1 − sign(A) x / width]

    With x = r − 1 this is SPO (arXiv:2401.16025), with x = π − b it is DRPO (arXiv:2606.09821). Past the top w is
    negative: the token is pulled back.
    """
    ratio = torch.exp(log_ratio)
    # Where A = 0 nothing pulls, not even an endless gap.
    pull = torch.where(advantage == 0, 0.0, torch.sign(advantage) * gap / width)
    weight = ratio * (1 - pull)
    return weight, ratio * advantage - advantage.abs() * torch.expm1(log_ratio) * gap / (2 * width)

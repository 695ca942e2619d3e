r"""Regions without an edge: SAPO's sigmoid gate, and the quadratic penalties of SPO and DRPO.

Each objective is given by its value and its weight w, where ∂objective/∂log π = w·A. `gradcheck` compares the two.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from trustrl.config.soft_regions import DRPO, SAPO, SPO
from trustrl.config.statistics import Ratio, Statistic
from trustrl.core.clean import CleanTokens
from trustrl.core.numerics import either
from trustrl.core.regions.decision import Decision, corrected


def soft_gate(
    log_ratio: Float[Tensor, " n"],
    advantage: Float[Tensor, " n"],
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    r"""Returns SAPO's (weight, objective).

        objective = (4/τ) σ(x) A,   w = 4 r σ(x) σ(−x),   x = τ(r − 1),   τ by the sign of A

    Computes w in logs: r may overflow where w goes to 0.

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
    r"""Returns (weight, objective) of an objective whose maximum lies where the signed gap x reaches its width.

        objective = r A − |A| (r − 1) x / (2·width),   w = r [1 − sign(A) x / width]

    SPO uses x = r − 1 (arXiv:2401.16025), DRPO x = π − b (arXiv:2606.09821). Past the maximum w is negative and pulls
    the token back.
    """
    ratio = torch.exp(log_ratio)
    # With A = 0 there is no pull, even if the gap is infinite.
    pull = torch.where(advantage == 0, 0.0, torch.sign(advantage) * gap / width)
    weight = ratio * (1 - pull)
    return weight, ratio * advantage - advantage.abs() * torch.expm1(log_ratio) * gap / (2 * width)


def probability_gap(tokens: CleanTokens) -> Float[Tensor, " n"]:
    """Returns π − b of the sampled token."""
    return torch.exp(tokens.log_policy) - torch.exp(tokens.log_anchor)


def decide_sapo(tokens: CleanTokens, region: SAPO) -> Decision:
    """Weights every token by SAPO's sigmoid gate and masks nothing."""
    weight, value = soft_gate(
        tokens.log_ratio,
        tokens.advantage,
        temperature_positive=region.temperature_positive,
        temperature_negative=region.temperature_negative,
    )
    return corrected(tokens, region.correction, _soft(tokens, weight, value))


def decide_spo(tokens: CleanTokens, region: SPO) -> Decision:
    """Applies SPO's quadratic penalty on r − 1."""
    decision = penalize(tokens, torch.expm1(tokens.log_ratio), region.width)
    return corrected(tokens, region.correction, decision)


def decide_drpo(tokens: CleanTokens, region: DRPO) -> Decision:
    """Applies DRPO's quadratic penalty on π − b."""
    return corrected(tokens, region.correction, penalize(tokens, probability_gap(tokens), region.width))


def penalize_by(tokens: CleanTokens, statistic: Statistic) -> Decision:
    """Applies the quadratic penalty with a statistic's bounds as its width: on r − 1 for `Ratio`, else on π − b."""
    max_decrease, max_increase = statistic.bounds
    width = either(tokens.log_ratio > 0, max_increase, max_decrease, like=tokens.log_ratio)
    gap = torch.expm1(tokens.log_ratio) if isinstance(statistic, Ratio) else probability_gap(tokens)
    return penalize(tokens, gap, width)


def penalize(tokens: CleanTokens, gap: Float[Tensor, " n"], width: Float[Tensor, " n"] | float) -> Decision:
    """Returns the decision of the quadratic penalty on a signed gap."""
    return _soft(tokens, *quadratic_penalty(tokens.log_ratio, gap, tokens.advantage, width=width))


def _soft(tokens: CleanTokens, weight: Tensor, value: Tensor) -> Decision:
    return Decision(torch.ones_like(tokens.usable), weight, tokens.logp, value=value)

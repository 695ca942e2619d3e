r"""SAPO: a sigmoid gate on the ratio instead of an edge.

    objective = (4/τ) σ(x) A,   x = τ(r − 1),   r = π/b,   τ by the sign of A
    M = 1,   w = 4 r σ(x) σ(−x),   ∂objective/∂log π = w A

The weight is 1 at r = 1, follows r nearby, and falls to 0 as r grows. The gate does not depend on the side: a token
that the update pulls back is damped as well, and so is one that has nearly vanished. The difference between
`trustrl/ratio_mean` and `trustrl/weight_mean` is what the gate damps. The value of the loss is the negative objective.

In other libraries:

- verl's `sapo` takes the mean over sequences whatever `loss_agg_mode` says.

Reference: Soft Adaptive Policy Optimization, arXiv:2511.20347.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.axes import Needs
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common, needs_of
from trustrl.regions.words import anchor_of, number

if TYPE_CHECKING:
    from torch import Tensor


def soft_gate(
    log_ratio: Tensor, advantage: Tensor, *, temperature_positive: float, temperature_negative: float
) -> tuple[Tensor, Tensor]:
    """Returns (w, objective). Computes w in logs: r may overflow where w goes to 0."""
    tau = ops.either(advantage > 0, temperature_positive, temperature_negative, like=log_ratio)
    x = tau * log_ratio.expm1()
    weight = 4 * (log_ratio + ops.logsigmoid(x) + ops.logsigmoid(-x)).exp()
    return weight, 4 / tau * x.sigmoid() * advantage


@dataclass(frozen=True, slots=True)
class SAPO(AnchoredRegion):
    """Soft adaptive policy optimization: a sigmoid gate on the ratio instead of an edge. arXiv:2511.20347."""

    kind: ClassVar[str] = "sapo"

    temperature_positive: float = 1.0
    """τ for A > 0."""

    temperature_negative: float = 1.05
    """τ for A ≤ 0: slightly sharper, as published."""

    def __post_init__(self) -> None:
        for name in ("temperature_positive", "temperature_negative"):
            validators.real(f"sapo.{name}", getattr(self, name), rule="a finite number > 0", low=0.0, high=1e6)
        check_common(self)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Weights every token by the sigmoid gate and masks nothing."""
        weight, value = soft_gate(
            tokens.log_ratio,
            tokens.advantage,
            temperature_positive=self.temperature_positive,
            temperature_negative=self.temperature_negative,
        )
        return ops.Decision(ops.keep_all(tokens), weight, tokens.logp, value=value)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return needs_of(None, self.anchor, self.correction)

    def words(self) -> str:
        """Describes what the region does to a token."""
        up, down = number(self.temperature_positive), number(self.temperature_negative)
        return (
            f"Masks nothing; a soft gate on π/{anchor_of(self)} reduces weights gradually, with temperature {up} for "
            f"positive advantages and {down} otherwise."
        )


def sapo_loss(
    logp: Tensor,
    anchor_logp: Tensor,
    advantage: Tensor,
    in_loss: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Tensor:
    r"""Returns SAPO's loss, ℓ = −(4/τ) σ(τ(r − 1)) A, with τ by the sign of A.

    Reference: Soft Adaptive Policy Optimization, arXiv:2511.20347.
    """
    region = SAPO(temperature_positive=temperature_positive, temperature_negative=temperature_negative)
    return ops.loss(region, logp, anchor_logp, advantage, in_loss)

r"""SPO: a quadratic penalty on r − 1 instead of an edge.

    objective = r A − |A| (r − 1) x / (2ε),   x = r − 1,   r = π/b
    M = 1,   w = r [1 − sign(A) x / ε],   ∂objective/∂log π = w A

The objective has its maximum where x reaches sign(A) ε. Past it w is negative and pulls the token back. A < 0 with r >
1 and A > 0 with r < 1 are strengthened: the penalty pulls towards r = 1 from both sides.

Limits:

- The weight grows with r²: a token with r = 50 and A > 0 has w = −12,200 at ε = 0.2. There is no cap. Read
  `trustrl/ratio_max`.
- `TrustRegion(Ratio(...), action="penalize")` has one width per side.

Reference: Simple Policy Optimization, arXiv:2401.16025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.statistics import Ratio
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common
from trustrl.regions.trust_region import TrustRegion

if TYPE_CHECKING:
    from torch import Tensor


def penalized(tokens: ops.Tokens, gap: Tensor, width: Tensor | float) -> ops.Decision:
    """Returns the decision of the quadratic penalty on a signed gap x."""
    log_ratio, advantage = tokens.log_ratio, tokens.advantage
    ratio = log_ratio.exp()
    # With A = 0 there is no pull, even if the gap is infinite.
    pull = ops.where(advantage == 0, 0.0, advantage.sign() * gap / width)
    value = ratio * advantage - advantage.abs() * log_ratio.expm1() * gap / (2 * width)
    return ops.Decision(ops.keep_all(tokens), ratio * (1 - pull), tokens.logp, value=value)


@dataclass(frozen=True, slots=True)
class SPO(AnchoredRegion):
    """Simple policy optimization: a quadratic penalty on r − 1. arXiv:2401.16025."""

    kind: ClassVar[str] = "spo"

    width: float = 0.2
    """ε: the objective has its maximum at |r − 1| = ε. The default is our choice."""

    def __post_init__(self) -> None:
        validators.real("spo.width", self.width, rule="a distance of the ratio from 1, > 0", low=0.0, high=1e6)
        check_common(self)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Applies the quadratic penalty on r − 1."""
        return penalized(tokens, tokens.log_ratio.expm1(), self.width)

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(
            Ratio(max_increase=self.width), anchor=self.anchor, action="penalize", correction=self.correction
        )


def spo_loss(logp: Tensor, anchor_logp: Tensor, advantage: Tensor, in_loss: Tensor, *, width: float = 0.2) -> Tensor:
    r"""Returns SPO's loss, ℓ = −(r A − |A| (r − 1)² / (2·width)).

    Reference: Simple Policy Optimization, arXiv:2401.16025.
    """
    return ops.loss(SPO(width=width), logp, anchor_logp, advantage, in_loss)

r"""CISPO: caps importance weights and masks nothing.

    M = 1,   w = min(r, C),   r = π/b,   ℓ = −sg(w) A log π

Every token keeps a gradient: a ratio above the cap is damped, not dropped. Weights have no lower bound. The cap acts on
log r, so a capped weight cannot overflow. `trustrl/capped_share` shows how often it acts; a cap that acts often biases
the gradient.

In other libraries:

- verl's `cispo` also raises ratios below 1 − `clip_ratio_low`, and caps at 1.2 by default. SkyRL's caps at 6.
- Clamping log r at ±20 is not a cap. Through a clamped ratio the gradient is silently 0; detached, the weight is e²⁰.

Reference: MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention, arXiv:2506.13585.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common
from trustrl.regions.trust_region import TrustRegion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class CISPO(AnchoredRegion):
    """CISPO: caps importance weights and masks nothing, w = min(r, C). arXiv:2506.13585."""

    kind: ClassVar[str] = "cispo"

    max_ratio: float = 5.0
    """C: 5, as in ScaleRL (arXiv:2510.13786) and in DPPO's scaling runs."""

    def __post_init__(self) -> None:
        validators.real(
            "cispo.max_ratio", self.max_ratio, rule="a cap on the weight, > 0", low=0.0, advice="For no cap use pg-is."
        )
        check_common(self)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Caps every weight and masks nothing."""
        return ops.masked(tokens, max_ratio=self.max_ratio)

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(
            None, anchor=self.anchor, action="truncate", max_ratio=self.max_ratio, correction=self.correction
        )


def cispo_loss(
    logp: Tensor, anchor_logp: Tensor, advantage: Tensor, in_loss: Tensor, *, max_ratio: float = 5.0
) -> Tensor:
    r"""Returns CISPO's loss: M = 1, w = min(r, max_ratio).

    Reference: MiniMax-M1, arXiv:2506.13585.
    """
    return ops.loss(CISPO(max_ratio=max_ratio), logp, anchor_logp, advantage, in_loss)

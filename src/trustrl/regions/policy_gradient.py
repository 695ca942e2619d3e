r"""The unconstrained baseline: the importance-weighted policy gradient without a region.

    M = 1,   w = r,   r = π/b,   ℓ = −sg(r) A log π

Reference: the objective that PPO bounds, arXiv:1707.06347, eq. 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common
from trustrl.regions.trust_region import TrustRegion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyGradient(AnchoredRegion):
    """Unconstrained baseline: importance-weighted policy gradient, w = r, without a mask."""

    kind: ClassVar[str] = "pg-is"

    def __post_init__(self) -> None:
        check_common(self)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Weights every token by its ratio and masks nothing."""
        return ops.masked(tokens)

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(None, anchor=self.anchor, action="truncate", correction=self.correction)


def policy_gradient_loss(logp: Tensor, anchor_logp: Tensor, advantage: Tensor, in_loss: Tensor) -> Tensor:
    r"""Returns the importance-weighted policy gradient without a region: M = 1, w = r."""
    return ops.loss(PolicyGradient(), logp, anchor_logp, advantage, in_loss)

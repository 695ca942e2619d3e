r"""PG-IS: the importance-weighted policy gradient without a region, a baseline.

    M = 1,   w = r,   r = π/b,   ℓ = −sg(r) A log π

It is also a test of the whole pipeline: before the first update of a batch, `trustrl/ratio_mean` and
`trustrl/ratio_max` are 1 if the trainer reproduces the sampler's numbers. If b sampled the tokens, the expectation of r
is 1, and `trustrl/kl_k1` and `trustrl/kl_k3` are unbiased for KL(b‖π). For a capped weight use `cispo`.

Reference: Proximal Policy Optimization Algorithms, arXiv:1707.06347, eq. 6: the objective that PPO bounds.
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

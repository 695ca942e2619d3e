r"""KPop: a symmetric mask on the larger of the two binary KLs.

    M = 0  iff  max(KL_bin(b‖π), KL_bin(π‖b)) > φ,   w = r,   r = π/b,   ℓ = −sg(M r) A log π

A token outside is masked on its way back too. At φ = 2 only extreme tokens are. D is a lower bound of the larger KL
over the whole vocabulary, needs the sampled token alone, and stays finite at a probability of 1.

In other libraries:

- `log(1 − p + 1e-8)`, common in binary KLs, is 40% low for near-certain tokens in float32, and infinite or NaN in bf16.

There is no paper: Taming Training-Inference Mismatch in Reinforcement Learning with Adaptive Masking Regions, a blog
post of May 2026, describes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.statistics import SymmetricBinaryKL
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common
from trustrl.regions.ipo import outside
from trustrl.regions.trust_region import TrustRegion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class KPOP(AnchoredRegion):
    """KPop: a symmetric mask on the larger of the two binary KLs."""

    kind: ClassVar[str] = "kpop"

    divergence: SymmetricBinaryKL = field(default_factory=SymmetricBinaryKL)
    """φ = 2.0 nats. We cannot trace this value to a published run."""

    def __post_init__(self) -> None:
        validators.instance("kpop.divergence", self.divergence, (SymmetricBinaryKL,))
        check_common(self)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Masks tokens outside the bound in either direction."""
        by = ops.measured(tokens, self.divergence)
        return ops.masked(tokens, outside(by.distance, tokens.log_ratio, **by.bounds), by)

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(self.divergence, anchor=self.anchor, direction="symmetric", correction=self.correction)


def kpop_loss(logp: Tensor, anchor_logp: Tensor, advantage: Tensor, in_loss: Tensor, *, max_kl: float = 2.0) -> Tensor:
    r"""Returns KPop's loss: M = 0 iff max(KL_bin(b‖π), KL_bin(π‖b)) > max_kl, w = r."""
    return ops.loss(KPOP(SymmetricBinaryKL(max_increase=max_kl)), logp, anchor_logp, advantage, in_loss)

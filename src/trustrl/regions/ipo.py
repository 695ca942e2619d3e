r"""IPO: a symmetric mask on the sampled token's probability gap, as in prime-rl.

    M = 0  iff  |π − b| > δ, in either direction,   w = r,   r = π/b
    ℓ = −sg(M r) A log π + τ log² r

A token outside is masked on its way back too, and stays where it is: nothing pulls it back. Rare tokens pass the mask
with any ratio, and weights have no cap.

Limits:

- The penalty acts on every usable token, masked ones and A = 0 included.
- `act_on="upper"` compares 1 − min(b, π), which exceeds 0.3 for most tokens even if nothing has moved.

There is no paper: the rule and its bound are those of prime-rl, as of September 2026.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.axes import Needs
from trustrl.config.statistics import BinaryTV
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common
from trustrl.regions.trust_region import TrustRegion

if TYPE_CHECKING:
    from torch import Tensor


def outside(divergence: Tensor, log_ratio: Tensor, *, max_increase: float, max_decrease: float) -> Tensor:
    """Flags tokens outside the bound, regardless of the update's direction. At r = 1 the looser bound applies."""
    looser = divergence.new_full((), max(max_increase, max_decrease))
    bound = ops.either(log_ratio > 0, max_increase, max_decrease, like=divergence)
    return divergence > looser.where(log_ratio == 0, bound)


@dataclass(frozen=True, slots=True)
class IPO(AnchoredRegion):
    """IPO: a symmetric mask on the sampled token's probability gap, as in prime-rl."""

    kind: ClassVar[str] = "ipo"

    divergence: BinaryTV = field(default_factory=lambda: BinaryTV(max_increase=0.3))
    """prime-rl uses 0.3 since September 2026, and 0.1 before."""

    log_ratio_penalty: float = field(default=0.0, kw_only=True)
    """τ: adds τ·log² r to the loss of every token, with gradient. Off by default."""

    def __post_init__(self) -> None:
        validators.instance("ipo.divergence", self.divergence, (BinaryTV,))
        validators.non_negative("ipo.log_ratio_penalty", self.log_ratio_penalty)
        check_common(self)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Masks tokens outside the bound in either direction, and penalizes every token's log² r if τ > 0."""
        by = ops.measured(tokens, self.divergence)
        decision = ops.masked(tokens, outside(by.distance, tokens.log_ratio, **by.bounds), by)
        if self.log_ratio_penalty == 0:
            return decision
        log_ratio = tokens.logp - tokens.log_anchor.to(tokens.logp.dtype)
        return replace(decision, penalty=self.log_ratio_penalty * log_ratio.square())

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(self.divergence, anchor=self.anchor, direction="symmetric", correction=self.correction)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return replace(self.axes().needs(), penalty="log_ratio_penalty" if self.log_ratio_penalty else None)


def ipo_loss(
    logp: Tensor,
    anchor_logp: Tensor,
    advantage: Tensor,
    in_loss: Tensor,
    *,
    max_gap: float = 0.3,
    log_ratio_penalty: float = 0.0,
) -> Tensor:
    r"""Returns prime-rl's IPO loss: M = 0 iff |π − b| > max_gap, w = r, plus log_ratio_penalty · log² r."""
    region = IPO(BinaryTV(max_increase=max_gap), log_ratio_penalty=log_ratio_penalty)
    return ops.loss(region, logp, anchor_logp, advantage, in_loss)

r"""OPSM: drops a sequence with A < 0 that became less likely, and masks single tokens of the others.

    M = 0 for the whole sequence  iff  A < 0 and mean_t log(μ/π) > δ                                     (eq. 9)
    M_t = 0 for a token that is `leaving` by its statistic, PPO's |r − 1| by default,   w = r,   r = π/b

Reference: DeepSeek-V3.2, arXiv:2512.02556.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.axes import Needs
from trustrl.config.statistics import Ratio, Statistic
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common, needs_of
from trustrl.regions.dppo import leaving
from trustrl.regions.trust_region import TrustRegion
from trustrl.regions.words import anchor_of, beyond, number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class OPSM(AnchoredRegion):
    """Off-policy sequence masking: drops a sequence with A < 0 that became less likely. arXiv:2512.02556, eq. 9.

    Sequences that are kept may have single tokens masked by a statistic: PPO's ratio by default.
    """

    kind: ClassVar[str] = "opsm"

    max_drift: float = 0.5
    """δ: the largest mean over the response of log μ − log π, in nats per token. The paper does not state its value."""

    statistic: Statistic | None = field(
        default_factory=lambda: Ratio(max_decrease=0.2, max_increase=0.28), kw_only=True
    )
    """Statistic that masks single tokens of kept sequences, measured from `anchor`; None masks none."""

    def __post_init__(self) -> None:
        validators.real("opsm.max_drift", self.max_drift, rule="nats per token, > 0", low=0.0)
        check_common(self)
        if self.statistic is not None:
            validators.instance("opsm.statistic", self.statistic, (Statistic,))
            TrustRegion(self.statistic, anchor=self.anchor, correction=self.correction)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Drops sequences by their mean drift from μ, and masks single tokens by the statistic."""
        log_ratio = tokens.log_ratio
        from_behavior = log_ratio
        if self.anchor == "proximal":
            assert tokens.log_mismatch is not None  # the region's needs include both anchors
            from_behavior = log_ratio + tokens.log_mismatch
        drift = -ops.sequence_mean(tokens, from_behavior)
        dropped = (tokens.advantage < 0) & (drift > self.max_drift)
        by, mask = None, dropped
        if self.statistic is not None:
            by = ops.measured(tokens, self.statistic)
            mask = dropped | leaving(by.distance, log_ratio, tokens.advantage, **by.bounds)
        decision = ops.masked(tokens, mask, by)
        return replace(decision, extra={"sequence_dropped": dropped})

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        needs = needs_of(self.statistic, self.anchor, self.correction, sequences=True)
        return replace(needs, anchors=needs.anchors | {"behavior"})

    def words(self) -> str:
        """Describes what the region does to a token."""
        drop = (
            f"Drops a response with a negative advantage once its mean log μ/π exceeds {number(self.max_drift)} nats."
        )
        if self.statistic is None:
            return drop
        too_far = beyond(self.statistic, anchor_of(self))
        return f"{drop} Masks a token of the others once {too_far} and the update pushes it further out."


def opsm_loss(
    logp: Tensor, behavior_logp: Tensor, advantage: Tensor, in_loss: Tensor, *, max_drift: float = 0.5
) -> Tensor:
    r"""Returns PPO's loss without the sequences that have A < 0 and a mean log(μ/π) > max_drift; rows are sequences.

    Reference: DeepSeek-V3.2, arXiv:2512.02556, eq. 9.
    """
    return ops.loss(OPSM(max_drift), logp, behavior_logp, advantage, in_loss)

r"""GMPO: clips each log-ratio on the side that A pushes it to, and weights a sequence by their geometric mean.

    objective = A·s,   s = exp(mean_t c_t),   c_t = log r_t clipped to its bound if A pushes it outward   (eq. 4)
    M_t = 0 iff the token is `leaving` by D = |log r|,   w = s,   r = π/b

Reference: Geometric-Mean Policy Optimization, arXiv:2507.20673.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.axes import Needs
from trustrl.config.statistics import LogRatio
from trustrl.config.terms import SequenceMeanTokenMean
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common, needs_of
from trustrl.regions.dppo import leaving
from trustrl.regions.words import anchor_of, beyond

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class GMPO(AnchoredRegion):
    """Geometric-mean policy optimization: clips each log-ratio, then weights by their mean. arXiv:2507.20673."""

    kind: ClassVar[str] = "gmpo"

    log_ratio: LogRatio = field(default_factory=LogRatio)
    """±0.4 nats, as in the paper: ratios in (e^-0.4, e^0.4)."""

    def __post_init__(self) -> None:
        validators.instance("gmpo.log_ratio", self.log_ratio, (LogRatio,))
        check_common(self)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Masks tokens beyond their bound, and weights by the geometric mean of the clipped ratios."""
        log_ratio = tokens.log_ratio
        by = ops.measured(tokens, self.log_ratio)
        mask = leaving(by.distance, log_ratio, tokens.advantage, **by.bounds)
        max_decrease, max_increase = self.log_ratio.bounds
        edge = ops.either(log_ratio > 0, max_increase, -max_decrease, like=log_ratio)
        log_s = ops.sequence_mean(tokens, edge.where(mask, log_ratio))
        return ops.masked(tokens, mask, by, log_weight=log_s, value=log_s.exp() * tokens.advantage)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        needs = needs_of(self.log_ratio, self.anchor, self.correction, sequences=True)
        return replace(needs, reduction=SequenceMeanTokenMean)

    def words(self) -> str:
        """Describes what the region does to a token."""
        b = anchor_of(self)
        return (
            f"Masks a token once {beyond(self.log_ratio, b)} and the update pushes it further out. The weight is the "
            f"geometric mean of π/{b} over the response, with log-ratios of masked tokens held at their bound."
        )


def gmpo_loss(
    logp: Tensor, anchor_logp: Tensor, advantage: Tensor, in_loss: Tensor, *, max_log_ratio: float = 0.4
) -> Tensor:
    r"""Returns GMPO's loss: M by |log r| as in PPO, w = exp(mean of the clipped log r); rows are sequences.

    Average as for `gspo_loss`. Reference: Geometric-Mean Policy Optimization, arXiv:2507.20673.
    """
    return ops.loss(GMPO(LogRatio(max_increase=max_log_ratio)), logp, anchor_logp, advantage, in_loss)

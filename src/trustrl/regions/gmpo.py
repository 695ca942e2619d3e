r"""GMPO: clips each log-ratio on the side that A pushes it to, and weights a sequence by their geometric mean.

    objective = A·s,   s = exp(mean_t c_t),   c_t = log r_t clipped to its bound if A pushes it outward   (eq. 4)
    M_t = 0 iff the token is `leaving` by D = |log r|,   w = s,   r = π/b

A clipped token has no gradient, but its bound stays in the mean and scales the other tokens of its sequence. All tokens
that are not clipped have the same weight, as in `gspo`. Bounds are distances of log r from 0: 0.4 nats keep ratios in
(0.67, 1.49).

Limits:

- The reduction must be `trustrl.SequenceMeanTokenMean`, and a sequence must be whole in its call.
- `trustrl/divergence_p99` is a quantile of |log r|, and `trustrl/weight_mean` the mean of s, not of r. The value of the
  loss is the negative objective. Do not compare it across regions.

In other libraries:

- verl 0.9 (`loss_mode=geo_mean`) reads PPO's `clip_ratio_low` and `clip_ratio_high` as nats: 0.2 keeps ratios in (0.82,
  1.22). It averages over the rows of a micro-batch, whatever `loss_agg_mode` is, and TRL 1.16 (`trl.experimental.gmpo`)
  over its sequences. Here the count is global. With equal bounds, one advantage per sequence and no empty row,
  gradients agree with both to 1e-6.
- TRL and the authors anchor on π'. verl's clip fraction also counts tokens that its clip leaves unchanged.
- The authors' ablations (no clip, one clip on the sum, no 1/T) are not implemented.

Reference: Geometric-Mean Policy Optimization, arXiv:2507.20673. We read the authors' code and notes of others, not the
paper's text.
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
    """±0.4 nats, as in the authors' scripts."""

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

r"""GSPO: one geometric-mean ratio per sequence, for the mask and for the weight.

    s = exp(mean over the sequence of log r),   r = π/b
    M = 0 iff the sequence is `leaving` by D = |s − 1|,   w = s,   ℓ = −sg(M w) A log π

The gradient is the paper's if each sequence is averaged over its tokens, then over sequences.

Limits:

- The reduction must be `trustrl.SequenceMeanTokenMean`. Any other is an error: it would be another algorithm.
- A sequence must be whole in its call.
- The bounds are for answers of hundreds of tokens. On answers of 22 tokens they masked 89% of all tokens. A token-level
  bound such as 0.2 would never mask one; a bound above 0.01 warns.
- One decision masks all tokens of a sequence, and `trustrl/masked_share_increase` goes by s: in a sequence masked for s
  > 1, tokens with r < 1 count there too. `trustrl/divergence_p99` is a quantile of |s − 1| over tokens.

Reference: Group Sequence Policy Optimization, arXiv:2507.18071.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.statistics import SequenceRatio
from trustrl.errors import TrustRLWarning
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common
from trustrl.regions.dppo import leaving
from trustrl.regions.trust_region import TrustRegion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class GSPO(AnchoredRegion):
    """Group sequence policy optimization: one geometric-mean ratio per sequence. arXiv:2507.18071."""

    kind: ClassVar[str] = "gspo"

    ratio: SequenceRatio = field(default_factory=lambda: SequenceRatio(max_decrease=3e-4, max_increase=4e-4))
    """(3e-4, 4e-4), as in the paper. A mean over hundreds of tokens hardly moves, so 0.2 would never mask anything."""

    def __post_init__(self) -> None:
        validators.instance("gspo.ratio", self.ratio, (SequenceRatio,))
        check_common(self)
        for name, bound in zip(("max_decrease", "max_increase"), self.ratio.bounds, strict=True):
            if 0.01 < bound < float("inf"):
                warnings.warn(
                    f"gspo.{name} = {bound:g} is {bound / 4e-4:,.0f} times the published 4e-4: the mean log-ratio over "
                    f"a whole sequence would have to reach {bound:g} per token before a token is masked. "
                    "Use a token-level bound such as 0.2 with `ppo`.",
                    TrustRLWarning,
                    stacklevel=3,
                )

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Masks and weights a sequence by the geometric mean of its ratios."""
        log_s = ops.sequence_mean(tokens, tokens.log_ratio)
        by = ops.measured(tokens, self.ratio, ops.point(log_s.expm1().abs()))
        mask = leaving(by.distance, log_s, tokens.advantage, **by.bounds)
        return ops.masked(tokens, mask, by, log_weight=log_s, side=log_s)

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(self.ratio, anchor=self.anchor, level="sequence", correction=self.correction)


def gspo_loss(
    logp: Tensor,
    anchor_logp: Tensor,
    advantage: Tensor,
    in_loss: Tensor,
    *,
    max_increase: float = 4e-4,
    max_decrease: float = 3e-4,
) -> Tensor:
    r"""Returns GSPO's loss; rows are sequences.

        s = exp(mean over the sequence of log r),   M by |s − 1| as in PPO,   w = s

    Average each sequence over its tokens, then over sequences: the paper's gradient is defined for that reduction.

    Reference: Group Sequence Policy Optimization, arXiv:2507.18071.
    """
    region = GSPO(SequenceRatio(max_increase=max_increase, max_decrease=max_decrease))
    return ops.loss(region, logp, anchor_logp, advantage, in_loss)

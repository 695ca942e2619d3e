r"""M2PO: masks the largest log-ratios until the second moment of the others is small.

    T = {t : A_t (r_t − 1) > 0},   r = π/b.  Remove the largest log² r from T until its mean over T is at most τ.
    M_t = 0 on the tokens removed,   w = r,   ℓ = −sg(w M) A log π

Tokens that the update pulls back are kept and are not in the mean. The cut follows from the batch: if even the smallest
log² r of T is above τ, all of T is masked.

Each call decides on its own tokens, so the mask depends on the split into micro-batches and ranks. For any split the
whole batch fulfills the bound: n kept tokens of a part have a sum of log² r of at most τ n, and so have all parts
together. The parts mask at least as many tokens as one call would: removing the largest first keeps the largest set
whose mean is at most τ, and the parts' kept tokens together are such a set.

Limits:

- For the exact mask of a step call `policy_loss` once on the whole step. In a trainer a call is one micro-batch of one
  rank; in prime-rl and tinker it is one sequence.
- Kept weights have no cap. No single token has a bound, so `when_stale="tighten"` is refused and divergence metrics are
  absent: read `trustrl/log_ratio_p99`.

In other libraries:

- Most public implementations cut within one micro-batch of one rank. ms-swift (a change after 4.6) gathers all ranks,
  and Trinity-RFT (open pull request 616) reads the whole optimizer batch. ms-swift also clamps log r at ±20.
- The authors' code (verl 0.4; verl's pull request 4131 copies it) is not algorithm 1: it measures π/π', and tokens
  above a cap keep using up the budget, so it masks more.
- AReaL measures π'/μ on all tokens and ignores A. Its masked tokens leave the denominator.

Reference: Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?, arXiv:2510.01161,
algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.axes import Needs
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common, needs_of
from trustrl.regions.words import anchor_of, number

if TYPE_CHECKING:
    from torch import Tensor


def beyond_moment(x: Tensor, among: Tensor, *, bound: float) -> Tensor:
    """Flags the largest x ≥ 0 that must be removed so that the mean of the others is at most the bound."""
    order = x.where(among, math.inf).argsort(stable=True)  # tokens that do not count go last
    means = x.where(among, 0.0)[order].cumsum(0) / ops.ones_like(x).cumsum(0)
    return ops.zeros_like(among).scatter(0, order, means > bound) & among


@dataclass(frozen=True, slots=True)
class M2PO(AnchoredRegion):
    """M2PO: masks the outward tokens with the largest log-ratios until their second moment is small. arXiv:2510.01161.

    The second moment is that of the tokens in one call. Over a split batch it stays below the bound too, and at least
    as many tokens are masked.
    """

    kind: ClassVar[str] = "m2po"

    max_second_moment: float = 0.04
    """τ: the largest mean of log² r over the kept tokens that the update pushes outward. The paper uses 0.04."""

    def __post_init__(self) -> None:
        validators.real("m2po.max_second_moment", self.max_second_moment, rule="nats squared, > 0", low=0.0)
        check_common(self)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Masks the tokens with the largest log² r among those that the update pushes outward."""
        outward = tokens.usable & ops.pushed_outward(tokens.log_ratio, tokens.advantage)
        return ops.masked(tokens, beyond_moment(tokens.log_ratio.square(), outward, bound=self.max_second_moment))

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return replace(needs_of(None, self.anchor, self.correction), whole_call=True)

    def words(self) -> str:
        """Describes what the region does to a token."""
        return (
            f"Masks the tokens with the largest |log π/{anchor_of(self)}| among those that the update pushes further "
            "out, until the mean of its square over the others in the micro-batch is at most "
            f"{number(self.max_second_moment)}."
        )


def m2po_loss(logp: Tensor, anchor_logp: Tensor, advantage: Tensor, in_loss: Tensor, *, bound: float = 0.04) -> Tensor:
    r"""Returns M2PO's loss: M = 0 on the largest outward log² r until the mean of the others is at most the bound.

    Reference: arXiv:2510.01161, algorithm 1.
    """
    return ops.loss(M2PO(bound), logp, anchor_logp, advantage, in_loss)

r"""CPPO: a cumulative divergence budget over each response.

    w_t = 1 − (1 − w_min)(t − 1)/max(T − 1, 1),   Z = w D,   S and W the running sums of Z and w
    M_t = 0  iff  A_t (r_t − 1) > 0 and Z_t > min(δ, δ + δ_b W_{t−1} − S_{t−1})                        (eq. 8-10)

Early tokens spend what later ones may not. S and W run over all tokens in the loss: masked ones, those that the update
pulls back and those with A = 0 spend like any other. Weights are π/b, as in `dppo-topk-tv`.

Limits:

- A response must be whole in its call. Packed tokens must be in time order.
- Tokens outside the loss, such as tool output, have no position and spend nothing. An infinite D spends any budget.
- Both bounds must be equal, because a budget has one size. Another divergence is possible: `CPPO(BinaryTV())`.
- `trustrl/divergence_p90` is D, not Z: it shows where `rate="p90"` lies between its clamps. `trustrl/undecided_share`
  compares D with δ alone, not with the remaining budget.

Reference: Beyond Uniform Token-Level Trust Region in LLM Reinforcement Learning, arXiv:2606.10968.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.axes import PrefixBudget
from trustrl.config.statistics import Divergence, TopKTV
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common
from trustrl.regions.trust_region import TrustRegion

if TYPE_CHECKING:
    from torch import Tensor


def overspent(
    tokens: ops.Tokens,
    divergence: Tensor,
    outward: Tensor,
    *,
    bound: float,
    rate: Tensor | float,
    last_weight: float,
) -> Tensor:
    """Flags tokens that the update pushes outward and that cost more than the response's remaining budget.

    Positions t = 1..T and both running sums run over all counted tokens, masked or not.
    """
    divergence = ops.finite(divergence)
    position = ops.sum_before(tokens, ops.ones_like(divergence))  # t − 1
    last = (ops.sequence_length(tokens, divergence) - 1).clamp(min=1.0)
    weight = 1 - (1 - last_weight) * position / last
    cost = weight * divergence
    budget = bound + rate * ops.sum_before(tokens, weight) - ops.sum_before(tokens, cost)
    return outward & (cost > budget.clamp(max=bound))


def beyond_budget(tokens: ops.Tokens, by: ops.Measured, budget: PrefixBudget) -> Tensor:
    """Flags tokens beyond the budget of their response, with the budget's own rate or the response's 90% quantile."""
    rate = budget.rate
    if rate == "p90":
        rate = ops.sequence_quantile(tokens, by.distance, share=0.9).clamp(budget.rate_low, budget.rate_high)
    outward, bound = ops.pushed_outward(tokens.log_ratio, tokens.advantage), by.bounds["max_increase"]
    return overspent(tokens, by.distance, outward, bound=bound, rate=rate, last_weight=budget.last_weight)


@dataclass(frozen=True, slots=True)
class CPPO(AnchoredRegion):
    """CPPO: a cumulative divergence budget over each response. arXiv:2606.10968, eq. 8-10."""

    kind: ClassVar[str] = "cppo"

    divergence: Divergence = field(default_factory=TopKTV)
    """Top-20 TV at δ = 0.15, the paper's for dense models; it has 0.2 for mixtures of experts."""

    budget: PrefixBudget = field(default_factory=PrefixBudget, kw_only=True)
    """Budget of a response and what each token adds to it, as in the paper."""

    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on the weight of unmasked tokens."""

    def __post_init__(self) -> None:
        validators.instance("cppo.divergence", self.divergence, (Divergence,))
        validators.instance("cppo.budget", self.budget, (PrefixBudget,))
        check_common(self, self.max_ratio)
        self.axes()

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Masks tokens once their response has spent its divergence budget."""
        by = ops.measured(tokens, self.divergence)
        return ops.masked(tokens, beyond_budget(tokens, by, self.budget), by, max_ratio=self.max_ratio)

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(
            self.divergence,
            anchor=self.anchor,
            level=self.budget,
            max_ratio=self.max_ratio,
            correction=self.correction,
        )

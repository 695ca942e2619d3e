r"""DPPO: masks a token that has left the divergence ball if the update pushes it further out.

    M = 0  iff  (A > 0, r > 1, D > δ⁺)  or  (A < 0, r < 1, D > δ⁻)                                      (eq. 12)
    w = min(r, C),   r = π/b,   ℓ = −sg(M w) A log π

    D = |π − b| of the sampled token (eq. 13), its binary KL (eq. 14), either over the top K (eq. 15-16), or exact

Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.statistics import BinaryKL, BinaryTV, Divergence, FullKL, FullTV, TopKKL, TopKTV
from trustrl.config.terms import TIS
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common
from trustrl.regions.trust_region import TrustRegion

if TYPE_CHECKING:
    from torch import Tensor

    from trustrl.core.records import PolicyTokens, RolloutTokens


def leaving(
    divergence: Tensor, log_ratio: Tensor, advantage: Tensor, *, max_increase: float, max_decrease: float
) -> Tensor:
    r"""Flags tokens that are outside the region and that the update pushes further out.

        (A > 0 and r > 1 and D > max_increase)  or  (A < 0 and r < 1 and D > max_decrease)

    A token outside the region that the update pulls back keeps its gradient. A token with A = 0 has none to mask.

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 12.
    """
    upward = (advantage > 0) & (log_ratio > 0) & (divergence > max_increase)
    downward = (advantage < 0) & (log_ratio < 0) & (divergence > max_decrease)
    return upward | downward


@dataclass(frozen=True, slots=True)
class DPPO(AnchoredRegion):
    """DPPO: masks a token that has left the divergence ball if the update pushes it further. arXiv:2602.04879, eq. 12.

    The mask and the weight are anchored on μ, as in the paper. The paper's ablation that collapses (figure 4) masks by
    π' and keeps the weight π/μ: use the preset `dppo-decoupled`. `anchor="proximal"` alone moves both to π'.
    """

    kind: ClassVar[str] = "dppo"

    divergence: Divergence = field(default_factory=BinaryTV)
    """Divergence *and* thresholds. Paper: TV 0.15 (sanity, LoRA) or 0.2 (8B and 30B runs), KL 0.05, K = 20."""

    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on π/b. Off by default. The paper's scaling runs use 5, our recommended presets 2."""

    def __post_init__(self) -> None:
        validators.instance("dppo.divergence", self.divergence, (Divergence,))
        check_common(self, self.max_ratio)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Masks tokens that leave the divergence ball around the anchor (eq. 12)."""
        by = ops.measured(tokens, self.divergence)
        mask = leaving(by.distance, tokens.log_ratio, tokens.advantage, **by.bounds)
        return ops.masked(tokens, mask, by, max_ratio=self.max_ratio)

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(self.divergence, anchor=self.anchor, max_ratio=self.max_ratio, correction=self.correction)


PRESETS = {
    "dppo-binary-tv": lambda: DPPO(BinaryTV()),
    "dppo-binary-kl": lambda: DPPO(BinaryKL()),
    "dppo-topk-tv": lambda: DPPO(TopKTV()),
    "dppo-topk-kl": lambda: DPPO(TopKKL()),
    "dppo-full-tv": lambda: DPPO(FullTV()),
    "dppo-full-kl": lambda: DPPO(FullKL()),
    # The paper's scaling runs, but for LoRA, whose TV has 0.15.
    "dppo-binary-tv-scaling": lambda: DPPO(BinaryTV(max_increase=0.2), max_ratio=5.0),
    "dppo-binary-kl-scaling": lambda: DPPO(BinaryKL(max_increase=0.05), max_ratio=5.0),
    "dppo-topk-tv-scaling": lambda: DPPO(TopKTV(max_increase=0.2), max_ratio=5.0),
    "dppo-topk-kl-scaling": lambda: DPPO(TopKKL(max_increase=0.05), max_ratio=5.0),
    # What docs/guides/choosing-a-region.md recommends; trustrl.regions.recommended names them.
    "dppo-binary-tv-capped": lambda: DPPO(BinaryTV(max_increase=0.3), max_ratio=2.0),
    "dppo-topk-tv-capped": lambda: DPPO(TopKTV(max_increase=0.3), max_ratio=2.0),
    # The ablation of the paper's figure 4, with TV in place of its KL: the mask uses π', the weight stays π/μ.
    "dppo-decoupled": lambda: DPPO(BinaryTV(), anchor="proximal", correction=TIS(max_ratio=math.inf)),
    # The ablation of figure 5: masks only a token with A < 0 that has lost more than half of the probability mass.
    "dppo-minimal": lambda: DPPO(BinaryTV(max_decrease=0.5, max_increase=math.inf)),
}

ALIASES = {"dppo": "dppo-binary-tv"}


def dppo_loss(
    logp: Tensor,
    behavior_logp: Tensor,
    advantage: Tensor,
    in_loss: Tensor,
    *,
    max_increase: float = 0.15,
    max_decrease: float = 0.15,
) -> Tensor:
    r"""Returns DPPO's loss with the binary total variation.

        D = |π − μ|,   M = 0  iff  (A > 0, r > 1, D > max_increase)  or  (A < 0, r < 1, D > max_decrease),   w = r

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 12-13.
    """
    region = DPPO(BinaryTV(max_increase=max_increase, max_decrease=max_decrease))
    return ops.loss(region, logp, behavior_logp, advantage, in_loss)


def dppo_kl_loss(
    logp: Tensor,
    behavior_logp: Tensor,
    advantage: Tensor,
    in_loss: Tensor,
    *,
    max_increase: float = 0.05,
    max_decrease: float = 0.05,
) -> Tensor:
    r"""Returns DPPO's loss with the binary KL.

        D = μ log(μ/π) + (1−μ) log((1−μ)/(1−π)),   M and w as in `dppo_loss`

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 12 and 14.
    """
    region = DPPO(BinaryKL(max_increase=max_increase, max_decrease=max_decrease))
    return ops.loss(region, logp, behavior_logp, advantage, in_loss)


def dppo_topk_loss(
    policy: PolicyTokens, rollout: RolloutTokens, *, max_increase: float = 0.15, max_decrease: float = 0.15
) -> Tensor:
    r"""Returns DPPO's loss with the total variation over the sampler's top K.

        D = ½(Σ_S |μ−π| + |m−p|),   S = TopK(μ, K) ∪ {a},   m, p the mass outside S;   M and w as in `dppo_loss`

    Args:
        policy: `logp` and `topk_logp`, the policy's log-probs at the recorded ids.
        rollout: `behavior_logp`, `advantage`, `in_loss`, `token_ids` and `topk`, the sampler's top K.
        max_increase: Bound where r > 1.
        max_decrease: Bound where r < 1.

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 12 and 15.
    """
    k = 1 if rollout.topk is None else rollout.topk.ids.shape[-1]
    return ops.loss_of_records(DPPO(TopKTV(k=k, max_increase=max_increase, max_decrease=max_decrease)), policy, rollout)

r"""MiniRL: PPO's mask on the trainer's drift π/π', and the weight π/μ.

    M = 0 iff the token is `leaving` by D = |π/π' − 1|,   w = min(π/μ, C),   ℓ = −sg(M w) A log π

The mask bounds how far the trainer has moved since the batch began, and the weight corrects for the sampler. Before the
first update π = π', so nothing is masked however large the mismatch is.

Limits:

- Both `behavior_logp` and `proximal_logp` are needed. The rule names both policies, so it has neither an anchor nor a
  correction.
- `trustrl/ratio_mean` and its neighbors compare π with π'. `trustrl/mismatch_ratio_mean` compares π' with μ.
- Without a cap the gradient is that of `PPO(anchor="proximal")` with an unbounded correction. With a cap they differ: C
  caps π/μ as a whole, `TIS` caps π'/μ alone.

Reference: Stabilizing Reinforcement Learning with LLMs: Formulation and Practices, arXiv:2512.01374.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.axes import Needs, StalenessRegion
from trustrl.config.statistics import Ratio
from trustrl.regions import ops
from trustrl.regions.base import check_staleness
from trustrl.regions.dppo import leaving
from trustrl.regions.words import anchor_of, beyond, number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class MiniRL(StalenessRegion):
    """MiniRL: PPO's mask on the trainer's drift π/π', and the weight w = min(π/μ, C). arXiv:2512.01374."""

    kind: ClassVar[str] = "minirl"

    ratio: Ratio = field(default_factory=lambda: Ratio(max_decrease=0.2, max_increase=0.28))
    """Bounds of |π/π' − 1|: those of `ppo`."""

    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on the weight. Off by default."""

    def __post_init__(self) -> None:
        validators.instance("minirl.ratio", self.ratio, (Ratio,))
        check_staleness(self)
        if self.max_ratio is not None:
            validators.real("minirl.max_ratio", self.max_ratio, rule="a cap on the weight, > 0, or None", low=0.0)

    def masks_tokens(self) -> bool:
        """Returns whether the region masks single tokens by a bound, which `when_stale="tighten"` requires."""
        return True

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Masks by the trainer's own drift π/π' and weights by π/μ."""
        assert tokens.log_mismatch is not None  # the region's needs include both anchors
        by = ops.measured(tokens, self.ratio)
        mask = leaving(by.distance, tokens.log_ratio, tokens.advantage, **by.bounds)
        log_weight = tokens.log_ratio + tokens.log_mismatch
        return ops.masked(tokens, mask, by, max_ratio=self.max_ratio, log_weight=log_weight)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return Needs(anchors=frozenset({"behavior", "proximal"}), anchor="proximal")

    def words(self) -> str:
        """Describes what the region does to a token."""
        outward = "and the update pushes it further out"
        cap = "" if self.max_ratio is None else f", capped at {number(self.max_ratio)}"
        return f"Masks a token once {beyond(self.ratio, anchor_of(self))} {outward}; weights are π/μ{cap}."


def minirl_loss(
    logp: Tensor,
    behavior_logp: Tensor,
    proximal_logp: Tensor,
    advantage: Tensor,
    in_loss: Tensor,
    *,
    max_increase: float = 0.28,
    max_decrease: float = 0.2,
) -> Tensor:
    r"""Returns MiniRL's loss: PPO's mask on π/π', weight w = π/μ.

    Reference: Stabilizing Reinforcement Learning with LLMs, arXiv:2512.01374.
    """
    rollout = ops.RolloutTokens(
        behavior_logp=behavior_logp, proximal_logp=proximal_logp, advantage=advantage, in_loss=in_loss
    )
    region = MiniRL(Ratio(max_increase=max_increase, max_decrease=max_decrease))
    return ops.loss_of_records(region, ops.PolicyTokens(logp=logp), rollout)

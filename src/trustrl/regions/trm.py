r"""TRM: masks a whole sequence if any of its tokens moved too far.

    M = 0 for the whole sequence  iff  max_t D_t > δ, or mean_t D_t > δ_mean if it is set
    w = min(r, C),   r = π/b,   ℓ = −sg(M w) A log π

There is no sign test. The longer a sequence, the more likely one token exceeds δ: compare `trustrl/masked_share` with
the length.

Limits:

- A sequence must be whole in its call, and both bounds of a statistic must be equal.
- `mean` must read the same ids as `statistic`, and a mean of the same class needs the smaller bound, because a mean
  never exceeds the maximum: `TRM(mean=TopKKL(max_increase=0.001))`.
- D over the top K is a lower bound of the KL, so a sequence may pass that the full KL would drop. k2, in `trm-sampled`,
  bounds nothing; set `mean=SampledK3()` there to test the mean by k3.
- `trustrl/divergence_p50` is a quantile of each sequence's maximum, repeated on its tokens.

Reference: Trust Region Masking for Long-Horizon LLM Reinforcement Learning, arXiv:2512.23075.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.axes import Needs
from trustrl.config.statistics import Divergence, FullKL, SampledK2, SampledK3, Statistic, TopKKL
from trustrl.errors import ConfigError
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common, needs_of
from trustrl.regions.ipo import outside
from trustrl.regions.words import anchor_of, beyond, capped

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TRM(AnchoredRegion):
    """Trust-region masking: masks a whole sequence if any of its tokens moved too far. arXiv:2512.23075.

    Masked sequences stay in the denominator.
    """

    kind: ClassVar[str] = "trm"

    statistic: Divergence | SampledK2 = field(default_factory=TopKKL)
    """Masks a sequence if max_t D exceeds this bound (0.05). A KL over the top K or the vocabulary, or `SampledK2` if
    only the sampled token is known."""

    mean: Divergence | SampledK3 | None = field(default=None, kw_only=True)
    """If set, also masks a sequence if mean_t D exceeds this bound (0.001 in the paper)."""

    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on the weight of unmasked tokens."""

    def __post_init__(self) -> None:
        validators.instance("trm.statistic", self.statistic, (Divergence, SampledK2))
        if self.mean is not None:
            validators.instance("trm.mean", self.mean, (Divergence, SampledK3))
        for name, stat in (("statistic", self.statistic), ("mean", self.mean)):
            if stat is not None and stat.max_increase != stat.max_decrease:
                raise ConfigError(
                    f"trm.{name} must have equal bounds, because the mask is symmetric, got {stat!r}. Give one bound."
                )
        check_common(self, self.max_ratio)
        self._refuse_mean()

    def _refuse_mean(self) -> None:
        by_max, by_mean = self.statistic, self.mean
        if by_mean is None:
            return
        same_unit = isinstance(by_mean, Divergence) and isinstance(by_max, Divergence) and by_mean.unit == by_max.unit
        if same_unit and by_mean.bounds[0] >= by_max.bounds[0]:
            raise ConfigError(
                f"trm.mean must have a bound below trm.statistic's, got {by_mean.bounds[0]:g} and "
                f"{by_max.bounds[0]:g}. A mean never exceeds the maximum, so it would never act. The paper uses 0.001."
            )
        supports = {(needs.topk, needs.full) for needs in map(self._needs_of, (by_max, by_mean))} - {(0, False)}
        if len(supports) > 1:
            raise ConfigError(
                f"trm.mean must read the same ids as trm.statistic, got {by_mean!r} and {by_max!r}. "
                "Use one k for both, or the whole vocabulary for both."
            )

    def _needs_of(self, statistic: Statistic | None) -> Needs:
        return needs_of(statistic, self.anchor, self.correction, sequences=True)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Masks whole sequences by the maximum of D and, if `mean` is set, by its mean."""
        drift = ops.sequence_mean(tokens, tokens.log_ratio)
        by = ops.measured(tokens, self.statistic, over=ops.sequence_max)
        mask = outside(by.distance, drift, **by.bounds)
        if self.mean is not None:
            by_mean = ops.measured(tokens, self.mean, over=ops.sequence_mean)
            mask = mask | outside(by_mean.distance, drift, **by_mean.bounds)
        return ops.masked(tokens, mask, by, max_ratio=self.max_ratio, side=drift)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        by_max, by_mean = self._needs_of(self.statistic), self._needs_of(self.mean)
        return replace(by_max, topk=max(by_max.topk, by_mean.topk), full=by_max.full or by_mean.full)

    def words(self) -> str:
        """Describes what the region does to a token."""
        b = anchor_of(self)
        mean = "" if self.mean is None else f", or its mean {beyond(self.mean, b)}"
        return f"Drops a whole sequence once its largest {beyond(self.statistic, b)}{mean}.{capped(self.max_ratio, b)}"


PRESETS = {"trm": TRM, "trm-full-kl": lambda: TRM(FullKL()), "trm-sampled": lambda: TRM(SampledK2())}


def trm_loss(
    logp: Tensor,
    anchor_logp: Tensor,
    advantage: Tensor,
    in_loss: Tensor,
    *,
    max_k2: float = 0.05,
) -> Tensor:
    r"""Returns the loss of trust-region masking on the sampled tokens; rows are sequences.

        M = 0 for the whole sequence iff max over its tokens of ½ log² r > max_k2,   w = r

    Reference: Trust Region Masking, arXiv:2512.23075.
    """
    return ops.loss(TRM(SampledK2(max_increase=max_k2)), logp, anchor_logp, advantage, in_loss)

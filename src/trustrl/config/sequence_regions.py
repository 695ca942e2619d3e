"""Settings of the regions that decide on whole sequences: GSPO, GMPO, OPSM, VESPO, CPPO and TRM."""

import warnings
from dataclasses import dataclass, field, replace
from typing import ClassVar

from trustrl.config import validators
from trustrl.config.axes import (
    AnchoredRegion,
    Needs,
    PrefixBudget,
    StalenessRegion,
    TrustRegion,
    check_common,
    check_staleness,
    needs_of,
)
from trustrl.config.statistics import (
    ANCHORS,
    Anchor,
    Divergence,
    LogRatio,
    Ratio,
    SampledK2,
    SampledK3,
    SequenceRatio,
    Statistic,
    TopKKL,
    TopKTV,
)
from trustrl.config.terms import SequenceMeanTokenMean
from trustrl.errors import ConfigError, TrustRLWarning


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

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(self.ratio, anchor=self.anchor, level="sequence", correction=self.correction)


@dataclass(frozen=True, slots=True)
class GMPO(AnchoredRegion):
    """Geometric-mean policy optimization: clips each log-ratio, then weights by their mean. arXiv:2507.20673."""

    kind: ClassVar[str] = "gmpo"

    log_ratio: LogRatio = field(default_factory=LogRatio)
    """±0.4 nats, as in the paper: ratios in (e^-0.4, e^0.4)."""

    def __post_init__(self) -> None:
        validators.instance("gmpo.log_ratio", self.log_ratio, (LogRatio,))
        check_common(self)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        found = needs_of(self.log_ratio, self.anchor, self.correction, sequences=True)
        return replace(found, reduction=SequenceMeanTokenMean)


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

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        found = needs_of(self.statistic, self.anchor, self.correction, sequences=True)
        return replace(found, anchors=found.anchors | {"behavior"})


@dataclass(frozen=True, slots=True)
class VESPO(StalenessRegion):
    """VESPO: a smooth weight on the sequence's whole ratio, φ(w) = w^k e^(λ(1 − w)), w = Π r. arXiv:2602.10693."""

    kind: ClassVar[str] = "vespo"

    power_positive: float = 2.0
    """k for A ≥ 0."""

    decay_positive: float = 3.0
    """λ for A ≥ 0."""

    power_negative: float = 3.0
    """k for A < 0."""

    decay_negative: float = 2.0
    """λ for A < 0."""

    anchor: Anchor = field(default="behavior", kw_only=True)
    """b in r = π/b. With `behavior`, w contains the mismatch between trainer and sampler."""

    def __post_init__(self) -> None:
        for name in ("power_positive", "decay_positive", "power_negative", "decay_negative"):
            validators.real(f"vespo.{name}", getattr(self, name), rule="a finite number > 0", low=0.0, high=1e6)
        validators.one_of("vespo.anchor", self.anchor, ANCHORS)
        check_staleness(self)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return needs_of(None, self.anchor, None, sequences=True)


@dataclass(frozen=True, slots=True)
class CPPO(AnchoredRegion):
    """CPPO: a cumulative divergence budget over each response. arXiv:2606.10968, eq. 8-10."""

    kind: ClassVar[str] = "cppo"

    divergence: Divergence = field(default_factory=TopKTV)
    """Top-20 TV at δ = 0.15 for dense models; 0.2 for mixtures of experts."""

    budget: PrefixBudget = field(default_factory=PrefixBudget, kw_only=True)
    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on the weight of unmasked tokens."""

    def __post_init__(self) -> None:
        validators.instance("cppo.divergence", self.divergence, (Divergence,))
        validators.instance("cppo.budget", self.budget, (PrefixBudget,))
        check_common(self, self.max_ratio)
        self.axes()

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(
            self.divergence,
            anchor=self.anchor,
            level=self.budget,
            max_ratio=self.max_ratio,
            correction=self.correction,
        )


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

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        by_max, by_mean = self._needs_of(self.statistic), self._needs_of(self.mean)
        return replace(by_max, topk=max(by_max.topk, by_mean.topk), full=by_max.full or by_mean.full)

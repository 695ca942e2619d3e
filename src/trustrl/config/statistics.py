"""Statistics: the distance of a token from the anchor together with its bounds.

The bounds are part of the statistic and carry its unit, so a probability gap cannot be read as a ratio or as nats.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from trustrl.config import validators
from trustrl.errors import ConfigError

Anchor = Literal["behavior", "proximal"]
ANCHORS: tuple[str, ...] = ("behavior", "proximal")


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistic:
    """Base class of statistics: two bounds in the statistic's unit. A token exactly at the bound is inside."""

    kind: ClassVar[str]
    unit: ClassVar[str]
    default_bound: ClassVar[float]
    largest_bound: ClassVar[float] = math.inf
    advice: ClassVar[str] = ""

    max_increase: float | None = None
    """Bound for tokens that rose (r > 1). If only one bound is given, it sets both."""

    max_decrease: float | None = None
    """Bound for tokens that fell (r < 1). `math.inf` disables a bound."""

    def __post_init__(self) -> None:
        bounds = {
            name: self._checked(name) for name in ("max_increase", "max_decrease") if getattr(self, name) is not None
        }
        either = next(iter(bounds.values()), self.default_bound)
        for name in ("max_increase", "max_decrease"):
            object.__setattr__(self, name, bounds.get(name, either))

    def _checked(self, name: str) -> float:
        value = getattr(self, name)
        # Infinity disables the bound; only finite bounds have a largest sensible value.
        high = math.inf if value == math.inf else self.largest_bound
        return validators.real(f"{self.kind}.{name}", value, rule=self.unit, low=0.0, high=high, advice=self.advice)

    @property
    def bounds(self) -> tuple[float, float]:
        """Both bounds as (max_decrease, max_increase)."""
        assert self.max_decrease is not None  # __post_init__ has set both
        assert self.max_increase is not None
        return self.max_decrease, self.max_increase


_RATIO_ADVICE = "A PPO ratio bound such as 1.2 belongs to `ppo`, written as the distance from 1: 0.2."


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio(Statistic):
    """D = |r − 1|, r = π/b: PPO's statistic. It does not bound a divergence."""

    kind: ClassVar[str] = "ratio"
    unit: ClassVar[str] = "a distance of the ratio from 1, > 0"
    default_bound: ClassVar[float] = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRatio(Statistic):
    """D = |log r|, r = π/b: GMPO's statistic. It does not bound a divergence."""

    kind: ClassVar[str] = "log-ratio"
    unit: ClassVar[str] = "a distance of the log-ratio from 0, in nats, > 0"
    default_bound: ClassVar[float] = 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRatio(Statistic):
    """D = |s − 1|, s = exp(mean over the sequence of log r): GSPO's statistic."""

    kind: ClassVar[str] = "sequence-ratio"
    unit: ClassVar[str] = "a distance of the sequence's mean ratio from 1, > 0"
    default_bound: ClassVar[float] = 4e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledK2(Statistic):
    """D = ½ log² r, from the sampled token alone."""

    kind: ClassVar[str] = "sampled-k2"
    unit: ClassVar[str] = "nats, > 0"
    default_bound: ClassVar[float] = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledK3(Statistic):
    """D = r − 1 − log r, from the sampled token alone; unbiased for KL(b‖π) when the token was drawn from b."""

    kind: ClassVar[str] = "sampled-k3"
    unit: ClassVar[str] = "nats, > 0"
    default_bound: ClassVar[float] = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence(Statistic):
    """Statistic with a certified interval: the exact divergence lies between its two ends."""

    has_upper_end: ClassVar[bool] = True

    act_on: Literal["lower", "upper"] = "lower"
    """End of the interval that is compared with the bound: `lower` (the paper) or `upper` (cautious)."""

    def __post_init__(self) -> None:
        # A slotted dataclass is a new class, so a bare super() would refer to the discarded one.
        Statistic.__post_init__(self)
        validators.one_of(f"{self.kind}.act_on", self.act_on, ("lower", "upper"))
        if self.act_on == "upper" and not self.has_upper_end:
            raise ConfigError(
                f"{self.kind}.act_on must be 'lower', got 'upper'. A KL over part of the vocabulary has no finite "
                "upper end, so every outward update would be masked. Use a TV, or full-kl."
            )


_TV_UNIT = "a probability gap in (0, 1]"


@dataclass(frozen=True, kw_only=True, slots=True)
class BinaryTV(Divergence):
    """D = |b − π| of the sampled token. arXiv:2602.04879, eq. 13."""

    kind: ClassVar[str] = "binary-tv"
    unit: ClassVar[str] = _TV_UNIT
    default_bound: ClassVar[float] = 0.15
    largest_bound: ClassVar[float] = 1.0
    advice: ClassVar[str] = _RATIO_ADVICE


@dataclass(frozen=True, kw_only=True, slots=True)
class BinaryKL(Divergence):
    """KL between "the sampled token" and "any other", anchor first. arXiv:2602.04879, eq. 14."""

    kind: ClassVar[str] = "binary-kl"
    has_upper_end: ClassVar[bool] = False
    unit: ClassVar[str] = "nats, > 0"
    default_bound: ClassVar[float] = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmetricBinaryKL(Divergence):
    """max(KL_bin(b‖π), KL_bin(π‖b)): the statistic of KPop."""

    kind: ClassVar[str] = "symmetric-binary-kl"
    has_upper_end: ClassVar[bool] = False
    unit: ClassVar[str] = "nats, > 0"
    default_bound: ClassVar[float] = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _TopK(Divergence):
    k: int = 20
    """Number of the anchor's most probable ids that are compared one by one. All others form one bucket."""

    def __post_init__(self) -> None:
        Divergence.__post_init__(self)
        validators.whole(f"{self.kind}.k", self.k, low=1, advice="For k = 0 use binary-tv or binary-kl.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKTV(_TopK):
    """TV over the anchor's top K, the sampled token, and one bucket for the rest. arXiv:2602.04879, eq. 15."""

    kind: ClassVar[str] = "topk-tv"
    unit: ClassVar[str] = _TV_UNIT
    default_bound: ClassVar[float] = 0.15
    largest_bound: ClassVar[float] = 1.0
    advice: ClassVar[str] = _RATIO_ADVICE


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKKL(_TopK):
    """KL over the anchor's top K, the sampled token, and one bucket for the rest. arXiv:2602.04879, eq. 16."""

    kind: ClassVar[str] = "topk-kl"
    has_upper_end: ClassVar[bool] = False
    unit: ClassVar[str] = "nats, > 0"
    default_bound: ClassVar[float] = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class FullTV(Divergence):
    """Exact TV over the whole vocabulary."""

    kind: ClassVar[str] = "full-tv"
    unit: ClassVar[str] = _TV_UNIT
    default_bound: ClassVar[float] = 0.15
    largest_bound: ClassVar[float] = 1.0
    advice: ClassVar[str] = _RATIO_ADVICE


@dataclass(frozen=True, kw_only=True, slots=True)
class FullKL(Divergence):
    """Exact KL(b‖π) over the whole vocabulary."""

    kind: ClassVar[str] = "full-kl"
    unit: ClassVar[str] = "nats, > 0"
    default_bound: ClassVar[float] = 0.05


STATISTICS: tuple[type[Statistic], ...] = (
    Ratio,
    LogRatio,
    SequenceRatio,
    SampledK2,
    SampledK3,
    BinaryTV,
    BinaryKL,
    SymmetricBinaryKL,
    TopKTV,
    TopKKL,
    FullTV,
    FullKL,
)


def settings_of(config: Any) -> dict[str, Any]:
    """Returns the fields of a settings object by name, in order."""
    return {field.name: getattr(config, field.name) for field in fields(config)}

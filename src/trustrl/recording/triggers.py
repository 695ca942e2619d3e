"""When to keep everything: rules on a step's numbers over all ranks, so that every rank decides the same.

They read the sums that engines report anyway (`trustrl.diagnostics`): no further pass over tokens, no further
communication. Quantiles come from histograms and are exact to one bin, at most 12.5 %.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from trustrl.config import checks
from trustrl.config.loading import KINDS
from trustrl.errors import ConfigError
from trustrl.metrics import HALF, quantile

OF = ("divergence", "divergence_upper", "log_ratio")


class Facts(NamedTuple):
    """What triggers may look at, of one step over all ranks."""

    step: int
    histograms: dict[str, list[float]]
    """By name in `OF`, as far as the region has them."""

    entropy: float | None
    """Mean over tokens in the loss, nats."""

    faults: dict[str, int]
    """Tokens that were NaN, infinite or impossible, by kind; only kinds that occurred."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trigger(ABC):
    """Base of every trigger."""

    kind: ClassVar[str]

    at_most_every: int = 100
    """After it has fired, a trigger rests for this many steps."""

    def __post_init__(self) -> None:
        checks.whole(f"{self.kind}.at_most_every", self.at_most_every, low=1)

    @property
    def num_steps(self) -> int:
        """How many of the last steps it looks at."""
        return 1

    @abstractmethod
    def fired(self, steps: Sequence[Facts]) -> dict[str, float] | None:
        """The numbers that made it fire, or None.

        Args:
            steps: the last ones, newest last; at the start of a run fewer than `num_steps`.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantileAbove(Trigger):
    """A quantile over the step's tokens lies above a level.

    Example:
        >>> QuantileAbove(of="log_ratio", quantile=0.99, level=2.0).kind
        'quantile-above'
    """

    kind: ClassVar[str] = "quantile-above"

    of: Literal["divergence", "divergence_upper", "log_ratio"]
    """D's lower end, its upper end, or |log r|."""

    level: float
    """In the unit of `of`: the statistic's, or nats."""

    quantile: float = 0.99

    def __post_init__(self) -> None:
        Trigger.__post_init__(self)
        checks.one_of(f"{self.kind}.of", self.of, OF)
        checks.non_negative(f"{self.kind}.level", self.level)
        checks.real(f"{self.kind}.quantile", self.quantile, rule="a share in (0, 1]", low=0.0, high=1.0)

    def fired(self, steps: Sequence[Facts]) -> dict[str, float] | None:
        """See `Trigger.fired`."""
        bins = steps[-1].histograms.get(self.of)
        if bins is None or not sum(bins):
            return None
        if self.of == "log_ratio":
            bins = [0.0] * HALF + [bins[HALF], *(bins[HALF + at] + bins[HALF - at] for at in range(1, HALF + 1))]
        value = quantile(bins, self.quantile)
        return {"value": value, "level": self.level} if value > self.level else None


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropySlope(Trigger):
    """The policy's mean entropy falls or rises faster than so many nats a step: the line through its last steps."""

    kind: ClassVar[str] = "entropy-slope"

    steps: int = 8
    """How many steps the line goes through."""

    max_fall: float | None = None
    """Nats a step, > 0. None leaves this side off."""

    max_rise: float | None = None

    def __post_init__(self) -> None:
        Trigger.__post_init__(self)
        checks.whole(f"{self.kind}.steps", self.steps, low=2)
        if self.max_fall is None and self.max_rise is None:
            raise ConfigError(f"{self.kind} must be given max_fall or max_rise, got neither: it could never fire.")
        for name in ("max_fall", "max_rise"):
            if getattr(self, name) is not None:
                checks.real(f"{self.kind}.{name}", getattr(self, name), rule="nats a step, > 0", low=0.0)

    @property
    def num_steps(self) -> int:
        """How many of the last steps it looks at."""
        return self.steps

    def fired(self, steps: Sequence[Facts]) -> dict[str, float] | None:
        """See `Trigger.fired`."""
        points = [(facts.step, facts.entropy) for facts in steps[-self.steps :] if facts.entropy is not None]
        if len(points) < self.steps:
            return None
        mean_step, mean = (sum(column) / len(points) for column in zip(*points, strict=True))
        slope = sum((at - mean_step) * (value - mean) for at, value in points)
        slope /= sum((at - mean_step) ** 2 for at, _ in points)
        falls = self.max_fall is not None and slope < -self.max_fall
        rises = self.max_rise is not None and slope > self.max_rise
        return {"slope": slope, "entropy": points[-1][1], "first_entropy": points[0][1]} if falls or rises else None


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite(Trigger):
    """Any token in the loss was NaN, infinite or impossible."""

    kind: ClassVar[str] = "non-finite"

    def fired(self, steps: Sequence[Facts]) -> dict[str, float] | None:
        """See `Trigger.fired`."""
        return {name: float(count) for name, count in steps[-1].faults.items()} or None


for _class in (QuantileAbove, EntropySlope, NonFinite):
    KINDS.register(_class.kind)(_class)

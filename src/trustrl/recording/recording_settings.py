"""Settings of a recording: how much to write, and the triggers that dump the last steps in full. No torch.

Triggers are rules on a step's numbers over all ranks, so every rank decides the same. They read the sums that engines
report anyway (`trustrl.core.diagnostics`) and need no further pass over tokens or communication. Quantiles come from
histograms and are exact to one bin, at most 12.5%.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, ClassVar, Literal, NamedTuple

from trustrl.config import validators
from trustrl.core.sum_table import HALF, quantile
from trustrl.errors import ConfigError
from trustrl.regions.loading import KINDS, config_from_dict

OF = ("divergence", "divergence_upper", "log_ratio")


class Facts(NamedTuple):
    """The numbers of one step over all ranks that triggers can read."""

    step: int
    histograms: dict[str, list[float]]
    """By name in `OF`; only those the region has."""

    entropy: float | None
    """Mean over the tokens in the loss, in nats."""

    faults: dict[str, int]
    """Number of NaN, infinite or impossible tokens by kind; only kinds that occurred."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trigger(ABC):
    """Base class of triggers."""

    kind: ClassVar[str]

    at_most_every: int = 100
    """Minimum number of steps between two firings."""

    def __post_init__(self) -> None:
        validators.whole(f"{self.kind}.at_most_every", self.at_most_every, low=1)

    @property
    def num_steps(self) -> int:
        """Number of recent steps that the trigger reads."""
        return 1

    @abstractmethod
    def fired(self, steps: Sequence[Facts]) -> dict[str, float] | None:
        """Returns the numbers that made the trigger fire, or None.

        Args:
            steps: The last steps, newest last. Fewer than `num_steps` at the start of a run.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantileAbove(Trigger):
    """Fires if a quantile over the step's tokens exceeds a level.

    Example:
        >>> QuantileAbove(of="log_ratio", quantile=0.99, level=2.0).kind
        'quantile-above'
    """

    kind: ClassVar[str] = "quantile-above"

    of: Literal["divergence", "divergence_upper", "log_ratio"]
    """The lower end of D, its upper end, or |log r|."""

    level: float
    """In the unit of `of`: the statistic's unit, or nats."""

    quantile: float = 0.99

    def __post_init__(self) -> None:
        Trigger.__post_init__(self)
        validators.one_of(f"{self.kind}.of", self.of, OF)
        validators.non_negative(f"{self.kind}.level", self.level)
        validators.real(f"{self.kind}.quantile", self.quantile, rule="a share in (0, 1]", low=0.0, high=1.0)

    def fired(self, steps: Sequence[Facts]) -> dict[str, float] | None:
        """See `Trigger.fired`."""
        bins = steps[-1].histograms.get(self.of)
        if bins is None or not sum(bins):
            return None
        if self.of == "log_ratio":
            bins = [0.0] * HALF + [
                bins[HALF],
                *(bins[HALF + offset] + bins[HALF - offset] for offset in range(1, HALF + 1)),
            ]
        value = quantile(bins, self.quantile)
        return {"value": value, "level": self.level} if value > self.level else None


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropySlope(Trigger):
    """Fires if the policy's mean entropy falls or rises too fast, by a linear fit through the last steps."""

    kind: ClassVar[str] = "entropy-slope"

    steps: int = 8
    """Number of steps in the fit."""

    max_fall: float | None = None
    """Nats per step, > 0. None disables this side."""

    max_rise: float | None = None

    def __post_init__(self) -> None:
        Trigger.__post_init__(self)
        validators.whole(f"{self.kind}.steps", self.steps, low=2)
        if self.max_fall is None and self.max_rise is None:
            raise ConfigError(
                f"{self.kind} must have max_fall or max_rise, got neither. Without a limit the trigger never fires."
            )
        for name in ("max_fall", "max_rise"):
            if getattr(self, name) is not None:
                validators.real(f"{self.kind}.{name}", getattr(self, name), rule="nats per step, > 0", low=0.0)

    @property
    def num_steps(self) -> int:
        """Number of recent steps that the trigger reads."""
        return self.steps

    def fired(self, steps: Sequence[Facts]) -> dict[str, float] | None:
        """See `Trigger.fired`."""
        points = [(facts.step, facts.entropy) for facts in steps[-self.steps :] if facts.entropy is not None]
        if len(points) < self.steps:
            return None
        mean_step, mean = (sum(column) / len(points) for column in zip(*points, strict=True))
        slope = sum((step - mean_step) * (value - mean) for step, value in points)
        slope /= sum((step - mean_step) ** 2 for step, _ in points)
        falls = self.max_fall is not None and slope < -self.max_fall
        rises = self.max_rise is not None and slope > self.max_rise
        return {"slope": slope, "entropy": points[-1][1], "first_entropy": points[0][1]} if falls or rises else None


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite(Trigger):
    """Fires if any token in the loss is NaN, infinite or impossible."""

    kind: ClassVar[str] = "non-finite"

    def fired(self, steps: Sequence[Facts]) -> dict[str, float] | None:
        """See `Trigger.fired`."""
        return {name: float(count) for name, count in steps[-1].faults.items()} or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Settings of a recording: a sample of every step on disk, the last steps in memory, and when to dump those.

    Example:
        >>> Recording.of({"folder": "records", "smaple": 0.1})
        Traceback (most recent call last):
        ...
        trustrl.errors.ConfigError: recording has no setting 'smaple'. Did you mean 'sample'? It has: folder, ...
        >>> Recording.of({"folder": "records", "triggers": [{"kind": "non-finite"}]}).triggers
        (NonFinite(at_most_every=100),)
    """

    kind: ClassVar[str] = "recording"

    folder: str | PathLike[str]
    """Directory for the files; created if missing. Several machines may share it, or each may have its own. An address
    such as `s3://bucket/run/records` writes to an object store: any that pyarrow or fsspec knows."""

    sample: float = 0.01
    """Share of the sequences written at each step, the same ones at every update. 0 writes none, 1 all."""

    max_rows_per_step: int = 100_000
    """Limit on rows (tokens × updates) written per step and rank. Sequences beyond it are dropped."""

    text: bool = True
    """Writes prompts and completions of these sequences too, to separate files."""

    topk: bool = False
    """Records the anchor's top-K too, if the region has one. Adds 8 K + 4 bytes per token."""

    kept_ids: bool = False
    """Records the ids that top-p, top-k or min-p left to sample from too. Adds 4 bytes per id to the file. In memory,
    a token takes as much as the largest kept set of its micro-batch."""

    experts: bool = False
    """Records the sampler's routed experts too. Adds 2 bytes per token, layer and chosen expert: 768 bytes per token
    for 48 layers and 8 experts. Needs a mixture of experts, and TRL with vLLM in colocate mode."""

    ring_steps: int = 8
    """Number of recent steps kept in full, in host memory. 0 keeps none."""

    ring_bytes: int = 256 * 2**20
    """Memory limit for these steps per rank. The oldest steps are dropped first."""

    triggers: tuple[Trigger, ...] = (NonFinite(),)
    """Rules for dumping the kept steps to disk."""

    max_dumps: int = 10
    """Maximum number of dumps per process."""

    spool: str | None = None
    """Local directory in which files for an object store wait for their upload. None uses one in `TMPDIR`."""

    spool_bytes: int = 2**30
    """Size per rank from which the spool is full. Steps are then dropped and counted."""

    def __post_init__(self) -> None:
        if not isinstance(self.folder, (str, PathLike)) or not fspath(self.folder):
            raise ConfigError(f"recording.folder must be a path, got {self.folder!r}.")
        object.__setattr__(self, "folder", str(fspath(self.folder)))
        if validators.non_negative("recording.sample", self.sample) > 1:
            raise ConfigError(f"recording.sample must be a share in [0, 1], got {self.sample!r}.")
        validators.whole("recording.max_rows_per_step", self.max_rows_per_step, low=1)
        validators.whole("recording.ring_steps", self.ring_steps, low=0)
        validators.whole("recording.ring_bytes", self.ring_bytes, low=1)
        validators.whole("recording.max_dumps", self.max_dumps, low=0)
        if self.spool is not None and (not isinstance(self.spool, (str, PathLike)) or "://" in str(self.spool)):
            raise ConfigError(f"recording.spool must be a local path or None, got {self.spool!r}.")
        object.__setattr__(self, "spool", None if self.spool is None else str(fspath(self.spool)))
        validators.whole("recording.spool_bytes", self.spool_bytes, low=1)
        validators.truth("recording.text", self.text)
        validators.truth("recording.topk", self.topk)
        validators.truth("recording.kept_ids", self.kept_ids)
        validators.truth("recording.experts", self.experts)
        if not isinstance(self.triggers, (list, tuple)):
            raise ConfigError(f"recording.triggers must be a tuple of triggers, got {self.triggers!r}.")
        object.__setattr__(self, "triggers", tuple(self.triggers))
        for trigger in self.triggers:
            if not isinstance(trigger, Trigger):
                raise ConfigError(
                    f"recording.triggers must contain triggers, got {trigger!r}. Create one, for example NonFinite()."
                )
        if self.triggers and not self.ring_steps:
            raise ConfigError(
                "recording.ring_steps must be ≥ 1 with triggers, got 0. A trigger would have nothing to dump."
            )

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Recording":
        """Builds the settings from a plain dictionary. Each trigger is a dictionary with a `kind`.

        Raises:
            ConfigError: If a key is unknown or a value is invalid.
            UnknownNameError: If a trigger's `kind` is not registered.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"recording must be a dictionary of settings, got {data!r}.")
        made = config_from_dict({"kind": cls.kind, **data})
        if not isinstance(made, cls):
            raise ConfigError(f"recording.kind must be {cls.kind!r}, got {made.kind!r}.")
        return made


for _class in (QuantileAbove, EntropySlope, NonFinite, Recording):
    KINDS.register(_class.kind)(_class)

"""What to record, where, and how much of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, ClassVar

from trustrl.config import checks
from trustrl.config.loading import KINDS, config_from_dict
from trustrl.errors import ConfigError
from trustrl.recording.triggers import NonFinite, Trigger


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A sample of every step on disk, the last steps in memory, and when to write those down too.

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
    """Where the files go; made if missing. On several machines: a file system that they share, or one on each."""

    sample: float = 0.01
    """Share of the sequences written at every step, the same ones at every update. 0 writes none, 1 all."""

    max_rows_per_step: int = 100_000
    """Rows (tokens × updates) written per step and rank; sequences that do not fit any more are left off."""

    topk: bool = False
    """Whether to record the anchor's top-K too, where the region has one: 8 K bytes a token more."""

    ring_steps: int = 8
    """How many of the last steps are kept in full, in host memory; 0 keeps none."""

    ring_bytes: int = 256 * 2**20
    """The most this may take per rank; older steps go first."""

    triggers: tuple[Trigger, ...] = (NonFinite(),)
    """When to write the kept steps down."""

    max_dumps: int = 10
    """How often, at most, from the start of a process."""

    def __post_init__(self) -> None:
        if not isinstance(self.folder, (str, PathLike)) or not fspath(self.folder):
            raise ConfigError(f"recording.folder must be a path, got {self.folder!r}.")
        object.__setattr__(self, "folder", str(fspath(self.folder)))
        if checks.non_negative("recording.sample", self.sample) > 1:
            raise ConfigError(f"recording.sample must be a share in [0, 1], got {self.sample!r}.")
        checks.whole("recording.max_rows_per_step", self.max_rows_per_step, low=1)
        checks.whole("recording.ring_steps", self.ring_steps, low=0)
        checks.whole("recording.ring_bytes", self.ring_bytes, low=1)
        checks.whole("recording.max_dumps", self.max_dumps, low=0)
        checks.truth("recording.topk", self.topk)
        if not isinstance(self.triggers, (list, tuple)):
            raise ConfigError(f"recording.triggers must be a tuple of triggers, got {self.triggers!r}.")
        object.__setattr__(self, "triggers", tuple(self.triggers))
        for trigger in self.triggers:
            if not isinstance(trigger, Trigger):
                raise ConfigError(
                    f"recording.triggers must hold triggers, got {trigger!r}. Build one, for example NonFinite()."
                )
        if self.triggers and not self.ring_steps:
            raise ConfigError("recording.ring_steps must be ≥ 1 with triggers, got 0: there would be nothing to write.")

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Recording":
        """The settings a plain dictionary describes; each trigger is one with a `kind`.

        Raises:
            ConfigError: a key or value does not fit.
            UnknownNameError: a trigger's `kind` nobody registered.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"recording must be a dictionary of settings, got {data!r}.")
        made = config_from_dict({"kind": cls.kind, **data})
        if not isinstance(made, cls):
            raise ConfigError(f"recording.kind must be {cls.kind!r}, got {made.kind!r}.")
        return made


KINDS.register(Recording.kind)(Recording)

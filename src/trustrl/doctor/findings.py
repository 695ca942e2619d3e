"""What a check says."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]
"""error: it will break or can be abused from outside. warning: it may. note: worth knowing."""

LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    level: Level
    what: str
    why: str
    do: str

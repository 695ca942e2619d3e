"""Result of one doctor check."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]
"""error: it will break a run, or others can abuse it. warning: it might. note: worth knowing."""

LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem on this machine: what it is, why it matters, and how to fix it."""

    level: Level
    what: str
    why: str
    do: str

"""Names of part files: steps, rank and attempt. No torch, no pyarrow."""

import re
from typing import NamedTuple

NAME = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{8,18}))?\.rank-([0-9]{4,9})(?:\.attempt-([0-9]{4,9}))?\.parquet")
"""Rule for the names of part files."""

FORM = "step-XXXXXXXX.rank-XXXX.parquet, or that with -XXXXXXXX after the step and .attempt-XXXX after the rank"
"""The rule in words, for messages."""


class PartName(NamedTuple):
    """Numbers in the name of a part file, in the order in which files are read.

    Example:
        >>> str(PartName(12, 12, 3)), str(PartName(0, 15, 3, attempt=2))
        ('step-00000012.rank-0003.parquet', 'step-00000000-00000015.rank-0003.attempt-0002.parquet')
        >>> PartName.of("step-00000012.rank-0003.parquet")
        PartName(first=12, last=12, rank=3, attempt=1)
    """

    first: int
    last: int
    """The last step. A file of one step has the same as `first`; a merged file has a later one."""

    rank: int
    attempt: int = 1
    """Number of the process among those that recorded this rank, from 1. The first one's files do not name it."""

    @classmethod
    def of(cls, name: str) -> "PartName | None":
        """Returns the numbers in a name, or None if it is not the name of a part file."""
        match = NAME.fullmatch(name)
        if match is None:
            return None
        first = int(match[1])
        part = cls(first, int(match[2] or first), int(match[3]), int(match[4] or 1))
        return part if part.last >= first and part.attempt >= 1 else None

    @property
    def is_merged(self) -> bool:
        """True if the file holds several steps."""
        return self.last > self.first

    def covers(self, other: "PartName") -> bool:
        """Returns True if this file, if readers take it, has the rows of the other one: it was merged or copied."""
        newer = self.attempt > other.attempt or (self.attempt == other.attempt and self.is_merged)
        inside = self.first <= other.first and other.last <= self.last
        return self != other and self.rank == other.rank and newer and inside

    def __str__(self) -> str:
        steps = f"step-{self.first:08d}" + (f"-{self.last:08d}" if self.is_merged else "")
        return f"{steps}.rank-{self.rank:04d}{attempt_suffix(self.attempt)}.parquet"


def attempt_suffix(attempt: int) -> str:
    """Returns the part of a file's name that names the attempt; nothing for the first."""
    return f".attempt-{attempt:04d}" if attempt > 1 else ""


_TRIGGER = re.compile(r"trigger\.rank-([0-9]{4,9})(?:\.attempt-([0-9]{4,9}))?\.json")


def dump_name(step: int) -> str:
    """Returns the name of the directory for the dump of a trigger that fired at this step."""
    return f"dump-{step:08d}"


def dump_step(name: str) -> int | None:
    """Returns the step in the name of a dump, or None if it is not such a name."""
    match = re.fullmatch("dump-([0-9]{8,18})", name)
    return int(match[1]) if match else None


def about_name(rank: int, attempt: int = 1) -> str:
    """Returns the name of the file that describes why a dump was written."""
    return f"trigger.rank-{rank:04d}{attempt_suffix(attempt)}.json"


def about_numbers(name: str) -> tuple[int, int] | None:
    """Returns rank and attempt in the name of a dump's description, or None if it is not such a name."""
    match = _TRIGGER.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else None

"""verl's console log: `step:1 - name:value - ...`, with or without Ray's prefixes and terminal colors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trustrl.files import bounded, lines_of, open_regular
from trustrl.runs.engine_settings import settings_of
from trustrl.runs.part import Part
from trustrl.runs.points import Points
from trustrl.runs.readers.files import Files, opening
from trustrl.runs.run_directory import LAST_WORDS

NAME = "verl console log"
LOOKS_FOR = "*.log, *.txt or *.out with lines `step:1 - ...`"

LARGEST_LINE = 8_000_000
"""Bytes of the largest line."""

LONGEST_CONFIG = 1_000_000
"""Characters of a printed configuration that are parsed."""

_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^\((?:\w+ )?(pid=\d+)(?:, ip=[^)]*)?\) ?")
_STEP = re.compile(r"step:(\d{1,15}) - (?=[^\s:]+:)")
_VALUE = re.compile(r"([^\s:]\S*):(?:np\.\w+\()?([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))")
_PROGRESS = re.compile(r"Training Progress:.{0,40}?\| *(\d{1,15})/(\d{1,15}) \[")
_SIGNS = (b"TaskRunner", b"actor_rollout_ref", b"verl", b"step:")


def read(files: Files) -> list[Part]:
    """Returns a part for each console log in the folder or one level below, the longest first."""
    candidates = files.matching("*.log", "*.txt", "*.out", "*/*.log", "*/*.txt", "*/*.out")
    if len(files.names) == 1 and not candidates:
        candidates = files.matching("*")
    parts = [part for file in candidates if _may_be(file) and (part := _read(files, file)) is not None]
    return sorted(parts, key=lambda part: -part.size)


def _may_be(file: Path) -> bool:
    start = opening(file)
    return b"\0" not in start and any(sign in start for sign in _SIGNS)


def _read(files: Files, file: Path) -> Part | None:
    """Returns the contents of one log, or None if it has no line of metrics, no configuration and no fault."""
    short = files.short(file)
    part, points, config, last = Part(source=NAME, engine="verl"), Points(), _Config(), list[str]()
    planned, cut = None, False
    try:
        with open_regular(file) as opened:
            for text in lines_of(opened, LARGEST_LINE):
                raw = text.decode("utf-8", errors="replace")
                who, line = _plain(raw)
                config.take(who, line)
                if (progress := _PROGRESS.findall(line)) and int(progress[-1][1]) > 0:
                    planned = int(progress[-1][1])
                if step := _STEP.search(line):
                    cut = not raw.endswith("\n")
                    points.add(int(step[1]), dict(_values(line[step.end() :])))
                last = [*last, line.rstrip()][-LAST_WORDS:] if line.strip() else last
    except OSError as error:
        part.faults.append(f"{short}: {error.strerror}; left out")
    engine, part.settings = settings_of(config.parsed())
    if not points.by_step and engine is None:
        return part if part.faults else None
    part.take(points, short)
    if cut:
        part.faults.append(f"{short}: the last line of metrics is truncated; its last value may be too")
    if config.begun is not None and engine is None:
        part.faults.append(f"{short}: the printed configuration could not be parsed; no settings from it")
    elif engine:
        part.found.append(f"settings in the configuration printed in {short}")
    part.settings.setdefault("steps_planned", planned)
    if any("Error" in line or "Traceback" in line for line in last):
        part.status, part.last_words = "failed", "\n".join(last)
    return part


def _plain(line: str) -> tuple[str, str]:
    """Returns the process that printed a line, and the line without colors and Ray's prefix."""
    line = _COLOR.sub("", line)
    prefix = _PREFIX.match(line)
    return (prefix[1], line[prefix.end() :]) if prefix else ("", line)


def _values(text: str) -> Iterator[tuple[str, float]]:
    """Yields the metrics of a line. The last value may be followed by other output without a space."""
    for item in text.split(" - "):
        if match := _VALUE.match(item):
            try:
                yield match[1], float(match[2])
            except ValueError:
                continue


class _Config:
    """Configuration that verl prints as a Python dict over many lines, by one process among others."""

    def __init__(self) -> None:
        self.begun: str | None = None
        self._open = False
        self._lines: list[str] = []
        self._size = 0

    def take(self, who: str, line: str) -> None:
        """Adds a line if it belongs to the printed dict."""
        if self.begun is None and line.startswith("{'") and ("'actor_rollout_ref'" in line or "'algorithm'" in line):
            self.begun, self._open = who, True
        if self._open and who == self.begun:
            self._lines.append(line)
            self._size += len(line)
            self._open = self._size < LONGEST_CONFIG and not line.rstrip().endswith("}}")

    def parsed(self) -> dict[Any, Any]:
        """Returns the dict, or an empty one. Only literals are evaluated."""
        if self._size > LONGEST_CONFIG:
            return {}
        try:
            literal = bounded(ast.literal_eval("".join(self._lines)) if self._lines else {})
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return {}
        return literal if isinstance(literal, dict) else {}

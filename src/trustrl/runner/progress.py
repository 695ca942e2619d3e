"""How a run is getting on, on stderr: one line that changes on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

SECONDS_BETWEEN_LINES = 5.0
SHOWN = {
    "reward": "reward", "trustrl/masked_share": "masked", "trustrl/projected_share": "projected",
    "trustrl/entropy": "entropy", "entropy": "entropy",
}  # fmt: skip


class Progress:
    """Says where a run is, at most every few seconds unless on a terminal."""

    def __init__(self, name: str, steps: int, stream: TextIO | None = None) -> None:
        self._name, self._steps = name, steps
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._began = time.perf_counter()
        self._last = -SECONDS_BETWEEN_LINES
        self._first: tuple[int, float] | None = None

    def step(self, row: Mapping[str, Any]) -> None:
        """After a step."""
        now = time.perf_counter() - self._began
        step = row["step"]
        first, at = self._first = self._first or (step, now)
        if not self._live and now - self._last < SECONDS_BETWEEN_LINES and step < self._steps:
            return
        self._last = now
        shown = {
            word: f"{word} {row[name]:.3f}" for name, word in SHOWN.items() if isinstance(row.get(name), (int, float))
        }
        left = ""
        if step > first:
            left = f", {(now - at) / (step - first) * (self._steps - step):.0f} s left"
        line = f"{self._name}: step {step} of {self._steps}, {', '.join(shown.values())}{left}"
        self._write(line, over=step < self._steps)

    def say(self, line: str) -> None:
        """A line that stays."""
        self._write(f"{self._name}: {line}", over=False)

    def _write(self, line: str, *, over: bool) -> None:
        start, end = ("\r\x1b[K", "" if over else "\n") if self._live else ("", "\n")
        print(f"{start}{line}", end=end, file=self._stream, flush=True)

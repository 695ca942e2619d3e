"""Progress display on stderr: a rich progress bar on a terminal, plain log lines elsewhere or without rich."""

import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

from trustrl.errors import MissingPackageError
from trustrl.optional_imports import need

SECONDS_BETWEEN_LINES = 5.0


class ProgressDisplay:
    """Progress of a task with a known number of steps.

    Use it as a context manager: leaving the context restores the terminal. Plain lines come at most every 5 s, except
    for the first and the last step.
    """

    def __init__(self, name: str, steps: int, stream: TextIO | None = None) -> None:
        """Prepares the display. The first `update` shows it."""
        self._name, self._steps = name, steps
        self._stream = sys.stderr if stream is None else stream
        self._began = time.perf_counter()
        self._last = -SECONDS_BETWEEN_LINES
        self._first: tuple[int, float] | None = None
        self._bar: Any = _bar(self._stream) if self._stream.isatty() else None
        self._task: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, step: int, text: str) -> None:
        """Shows that `step` is done."""
        now = time.perf_counter() - self._began
        first, first_seconds = self._first = self._first or (step, now)  # a resumed run does not begin at step 1
        left = f"{(now - first_seconds) / (step - first) * (self._steps - step):.0f} s left" if step > first else ""
        if self._bar is not None:
            self._show(step, ", ".join(filter(None, (text, left))))
        elif now - self._last >= SECONDS_BETWEEN_LINES or step >= self._steps:
            self._last = now
            self._print(", ".join(filter(None, (f"{self._name}: step {step} of {self._steps}", text, left))))

    def log(self, line: str) -> None:
        """Prints a line, above the bar if one is shown."""
        self._print(f"{self._name}: {line}")

    def close(self) -> None:
        """Removes the live display from the terminal, leaving the bar's last state."""
        if self._bar is not None:
            self._bar.stop()

    def _show(self, step: int, text: str) -> None:
        if self._task is None:
            self._task = self._bar.add_task(self._name, total=self._steps, completed=step, text=text)
            self._bar.start()
        self._bar.update(self._task, completed=step, text=text, refresh=step >= self._steps)

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self._stream, flush=True)


def _bar(stream: TextIO) -> Any:
    """Creates a rich progress bar. Returns None if rich is not installed or the terminal cannot move its cursor."""
    try:
        console = need("rich.console", extra="run").Console(file=stream)
        rich_progress = need("rich.progress", extra="run")
    except MissingPackageError:
        return None
    if not console.is_interactive:
        return None
    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(bar_width=24),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn("{task.fields[text]}", markup=False),
        console=console,
        redirect_stdout=False,  # stdout is for data
    )

"""Runs of `trustrl` in processes of their own, without the shim."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from failures.faults import without_faults
from failures.forked import Ended


class Started:
    """A process that runs `trustrl`, with everything that it starts in one session."""

    def __init__(self, arguments: Sequence[str], log: Path, **environment: str) -> None:
        self.log, self.began = log, time.monotonic()
        with log.open("w") as said, log.with_name(f"{log.name}.out").open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trustrl.cli", *arguments], stdout=output, stderr=said, start_new_session=True,
                env={**without_faults(os.environ), **environment}, cwd=log.parent,
                preexec_fn=_hear_interrupts,
            )  # fmt: skip

    def wait_until(self, reached: Callable[[], bool], limit: float = 300.0) -> bool:
        """Waits until something is the case. Returns False if the process ended before, or the time is over."""
        deadline = time.monotonic() + limit
        while self.process.poll() is None and time.monotonic() < deadline:
            if reached():
                return True
            time.sleep(0.02)
        return False

    def ended(self, limit: float = 300.0) -> Ended:
        """Waits for the end. A process that does not end in time is killed, with the code of SIGKILL."""
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
        return Ended(self.process.wait(), self.log.read_text(errors="replace"), time.monotonic() - self.began)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the process alone, as a scheduler or the kernel would."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


def _hear_interrupts() -> None:
    """Undoes what a shell does to its background processes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Ended:
    """Runs `trustrl` to its end."""
    return Started(arguments, log, **(environment or {})).ended()


def lines(file: Path) -> int:
    """Returns the number of complete lines, 0 if there is no file."""
    with suppress(FileNotFoundError):
        return file.read_bytes().count(b"\n")
    return 0

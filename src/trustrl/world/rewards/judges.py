"""Child processes that score completions for one process of the trainer."""

import json
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from queue import LifoQueue
from threading import Lock
from typing import Any

from trustrl.errors import ConfigError, EngineError, TrustRLWarning
from trustrl.world.rewards.reward_function import RewardFunction

START_SECONDS = 120.0
"""Time limit for loading a function."""

ALL_FAILED = 32
"""If the function fails for each of the first completions, so many of them, its own fault is likely."""


class _Judge:
    """One process, started when it is first asked and again after it was killed."""

    def __init__(self, table: RewardFunction) -> None:
        self._table = table
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the answer, or None after the time limit. The process is then dead."""
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._ended()
        return self._read(self._table.seconds)

    def start(self) -> None:
        """Starts the process unless it runs, and waits until it has loaded the function."""
        if self._process is not None:
            return
        table = asdict(self._table)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trustrl.world.rewards.judge", json.dumps(table)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        answer = self._read(START_SECONDS)
        if answer is None or "error" in answer:
            fault = f"it took longer than {START_SECONDS:.0f} s" if answer is None else answer["error"]
            self.stop()
            raise ConfigError(f"reward.function must be loadable, got {self._table.function!r}: {fault}.")

    def _read(self, seconds: float) -> dict[str, Any] | None:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, line = self._process.stdout.fileno(), b""
        deadline = time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                self.stop()
                return None
            part = os.read(descriptor, 65_536)
            if not part:
                return self._ended()
            line += part
        return json.loads(line)

    def _ended(self) -> dict[str, Any]:
        assert self._process is not None
        self.stop()
        return {"error": "its process ended by itself, perhaps for lack of memory"}

    def stop(self) -> None:
        """Kills the process and those it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # by what was not sent yet
                    pipe.close()
            self._process.wait()
            self._process = None


class Judges:
    """Scores completions with one function. Threads may share it; each takes a free process.

    Attributes:
        scored: Number of completions so far.
        faults: Number of them that got 0 because the function broke a limit or raised, by kind.
    """

    def __init__(self, table: RewardFunction) -> None:
        self.table = table
        self.scored = 0
        self.faults: Counter[str] = Counter()
        self._counting = Lock()
        self._free: LifoQueue[_Judge] = LifoQueue()
        for _ in range(table.processes):
            self._free.put(_Judge(table))

    def start(self) -> None:
        """Starts a process.

        Raises:
            ConfigError: If the function cannot be loaded.
        """
        judge = self._free.get()
        try:
            judge.start()
        finally:
            self._free.put(judge)

    def score(self, arguments: Mapping[str, Any]) -> float:
        """Returns the function's score, or 0 if it breaks a limit or raises, which is counted and warned about.

        Raises:
            ConfigError: If the function cannot be loaded.
            EngineError: If it returns something other than a finite number, or fails for each of the first completions.
        """
        judge = self._free.get()
        try:
            answer = judge.ask(arguments)
        finally:
            self._free.put(judge)
        if answer is None:
            fault = ("time", f"took longer than {self.table.seconds:g} s")
        else:
            fault = ("error", f"failed: {answer['error']}") if "error" in answer else None
        with self._counting:
            self.scored += 1
            if fault is not None:
                self._count(*fault)
        if answer is None or fault is not None:
            return 0.0
        if "refused" in answer:
            raise EngineError(f"{self.table.function!r} must return a finite number, got {answer['refused']}.")
        return answer["score"]

    def _count(self, kind: str, sentence: str) -> None:
        self.faults[kind] += 1
        count, total = self.faults[kind], self.faults.total()
        if total == self.scored == ALL_FAILED:
            raise EngineError(
                f"{self.table.function!r} must score completions, got no score for any of the first {total}. The last "
                f"time it {sentence}."
            )
        if count in (1, 10, 100) or count % 1000 == 0:
            warnings.warn(
                f"The reward function {self.table.function!r} {sentence}. Such completions get 0: {count} of "
                f"{self.scored} so far.",
                TrustRLWarning,
                stacklevel=3,
            )

    def close(self) -> None:
        """Ends the processes. They end with this process, too."""
        for _ in range(self.table.processes):
            self._free.get().stop()
        for _ in range(self.table.processes):
            self._free.put(_Judge(self.table))


_CREATING = Lock()


def judges_of(table: str) -> Judges:
    """Returns this process's judges for a table in JSON. All tasks of the process share them."""
    with _CREATING:  # a cache alone lets each of several threads create its own
        return _judges_of(table)


@lru_cache
def _judges_of(table: str) -> Judges:
    return Judges(RewardFunction(**json.loads(table)))

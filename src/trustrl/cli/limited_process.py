"""Child process with limits on memory and time for commands that read files from outside. Linux only.

Readers count before they decode (`trustrl.limits`); this is the net below them, for what nobody thought of. The whole
command runs in the child, which prints its own answer, so nothing is copied between the processes. The child is forked
before anything large is imported, which takes a few milliseconds.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from trustrl import limits
from trustrl.terminal import complain

MEMORY, PER_CPU = 1_700_000_000, 2**24
"""Bytes of private memory of a process, and further ones for each CPU: torch and arrow start a thread on each, whose
stack counts in full. Loaded libraries come on top: with torch about 300 million."""

SECONDS, BYTES_PER_SECOND = 60, 1_000_000
"""CPU seconds of a command, and the bytes of its input that add a further one. The slowest reader, of TensorBoard
events, takes 8,000,000 bytes per second."""

WALL = 5
"""Seconds on the clock for each CPU second. Other programs may use the CPU."""

VERBS = ("plan", "report", "watch", "explain", "audit", "calibrate", "bound", "records")
"""Verbs that run in a child. `watch` has no limit on time, and neither has a command that reads an address."""

_MOST_FILES = 100_000


def run_in_child(words: Sequence[str]) -> None:
    """Returns in a child process with limits if these are the words of a verb that reads files, else in this process.

    The calling process waits for the child and exits as it did, with a message if a limit ended it.
    """
    if sys.platform != "linux" or not words or words[0] not in VERBS or "--ray" in words:
        return
    factor = limits.factor()
    size = None if words[0] == "watch" else _size(words[1:])
    seconds = None if size is None else int((SECONDS + size / BYTES_PER_SECOND) * factor) + 1
    passed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller that ignores it would hide the child's end
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    parent = os.getpid()
    child = os.fork()
    if child:
        _wait(child, passed_on - before, seconds)
    _limit(parent, _memory(), seconds)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def out_of_memory() -> str:
    """Returns the message of a command that could not allocate memory."""
    return f"Reading takes more memory than the {_memory():,} bytes allowed. {limits.advice(2 * limits.factor())}."


def _memory() -> int:
    return int(MEMORY * limits.factor()) + PER_CPU * (os.cpu_count() or 1)


def _limit(parent: int, memory: int, seconds: int | None) -> None:
    import ctypes
    import resource

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the child ends with its parent
    if os.getppid() != parent:
        os._exit(1)
    for kind, limit in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0)):
        if limit is not None:
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, hard))
    # Arrow's own pool reserves a gigabyte that it may never use.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def _size(words: Sequence[str]) -> int | None:
    """Returns the bytes on disk of the files and folders among these words. None if one is an address."""
    total, left = 0, _MOST_FILES
    folders: list[str] = []
    for word in words:
        if "://" in word:
            return None
        path = word.partition("::")[0]
        if os.path.isdir(path):
            folders.append(path)
        elif os.path.isfile(path):
            total += os.stat(path).st_blocks * 512
    while folders and left:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    left = max(0, left - 1)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:  # the command itself reports it
            continue
    return total


def _wait(child: int, signals: set[signal.Signals], seconds: int | None) -> NoReturn:
    """Waits for the child, passes signals on, and exits with its code."""
    import time

    end = None if seconds is None else time.monotonic() + WALL * seconds
    while True:
        left = 3600.0 if end is None else max(0.0, end - time.monotonic())
        about = signal.sigtimedwait(signals, left)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if about is not None and about.si_signo != signal.SIGCHLD and about.si_code <= 0:
            os.kill(child, about.si_signo)  # from a process; the terminal sends its signals to both
        elif about is None and end is not None and time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            complain(
                f"error: Reading takes more than {WALL * (seconds or 0):,} seconds. "
                f"{limits.advice(2 * limits.factor())}."
            )
            os._exit(1)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        complain(f"error: Reading takes more than {seconds:,} CPU seconds. {limits.advice(2 * limits.factor())}.")
    elif code < 0 and -code not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        complain(
            f"error: The process that read the files ended by {signal.Signals(-code).name}. A file may be damaged, or "
            f"take more memory than allowed. {limits.advice(2 * limits.factor())}."
        )
    ended_by_limit = -code in (signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL)
    os._exit(code if code >= 0 else 1 if ended_by_limit else 128 - code)

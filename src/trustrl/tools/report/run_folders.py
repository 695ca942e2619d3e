"""Run directories as a report reads them: recipe, metrics, and status.

Only `recipe.toml` must exist. Any other file may be missing or incomplete.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trustrl.config.axes import Region
from trustrl.config.loading import config_from_dict
from trustrl.errors import ConfigError, RecordError, TrustRLError
from trustrl.recording.record_files import RECORDS
from trustrl.runner.directory import RunDirectory
from trustrl.runner.grid import LAST_WORDS
from trustrl.runner.run_verdict import summary

Status = Literal["finished", "unfinished", "failed"]


@dataclass(frozen=True, slots=True)
class Run:
    """One run."""

    path: Path
    label: str
    """Label that distinguishes it from the other runs of the report."""

    recipe: dict[str, Any]
    """Contents of recipe.toml."""

    region: Region | None
    """None if the region is not registered here. Reports then list its settings."""

    rows: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    verdict: dict[str, Any]
    """Summary of the run so far, by the rules of `trustrl.runner.run_verdict`."""

    status: Status
    last_words: str
    """Last lines of the log of an unfinished run, or empty."""

    seconds: float | None

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return str(self.recipe.get("name", self.path.name))

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def steps_planned(self) -> int | None:
        """Number of steps in the recipe, or None."""
        return self.table("schedule").get("steps")

    @property
    def records(self) -> Path:
        """Folder of the recorded tokens. It may not exist."""
        return self.path / RECORDS

    def table(self, name: str) -> Mapping[str, Any]:
        """Returns one table of the recipe, or an empty mapping."""
        found = self.recipe.get(name)
        return found if isinstance(found, Mapping) else {}


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads the runs in these folders.

    Raises:
        ConfigError: If a folder is not a run directory, or is given twice.
        RecordError: If a file of a run cannot be read.
    """
    resolved = [folder.resolve() for folder in folders]
    for folder in folders:
        if not (folder / "recipe.toml").is_file():
            raise ConfigError(
                f"RUN must be a run directory that `trustrl run` created, got {folder}, which has no recipe.toml."
            )
        if resolved.count(folder.resolve()) > 1:
            raise ConfigError(f"Each RUN must be given once, got {folder} twice.")
    recipes = [_recipe(folder) for folder in folders]
    labels = short_labels([str(recipe.get("name", "run")) for recipe in recipes], folders)
    return [_run(*one) for one in zip(folders, labels, recipes, strict=True)]


def _run(folder: Path, label: str, recipe: dict[str, Any]) -> Run:
    directory = RunDirectory(folder)
    rows, evaluations = (_ordered(directory.rows(name)) for name in ("metrics", "evaluation"))
    verdict = summary(rows, evaluations, updates_per_batch(recipe))
    result = directory.result() if directory.finished else {}
    status, words = _ending(folder, finished=directory.finished)
    return Run(folder, label, recipe, _region(recipe), rows, evaluations, verdict, status, words, result.get("seconds"))


def updates_per_batch(recipe: Mapping[str, Any]) -> int:
    """Returns the number of updates on each rollout, or 1 if the recipe does not have a valid number."""
    schedule = recipe.get("schedule")
    found = schedule.get("updates_per_batch") if isinstance(schedule, Mapping) else None
    return found if isinstance(found, int) and found > 0 else 1


def _ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["step"])


def _recipe(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise RecordError(f"{folder / 'recipe.toml'} must be valid TOML, got {error}.") from None


def _region(recipe: Mapping[str, Any]) -> Region | None:
    try:
        found = config_from_dict(recipe["region"])
    except (TrustRLError, TypeError, KeyError):
        return None
    return found if isinstance(found, Region) else None


def _ending(folder: Path, *, finished: bool) -> tuple[Status, str]:
    """Returns the status, and the last lines of the log that `trustrl compare` writes next to the folder."""
    if finished:
        return "finished", ""
    log = folder.resolve().with_suffix(".log")
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_WORDS:] if log.is_file() else []
    except OSError:
        lines = []
    failed = any(line.startswith(("error:", "Traceback")) for line in lines)
    return "failed" if failed else "unfinished", "\n".join(lines)


def short_labels(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Returns the names without their common first and last words. Adds the folder's name if two are equal.

    Example:
        >>> short_labels(["stale-ppo-7", "stale-dppo-topk-tv-7"], [Path("a"), Path("b")])
        ['ppo', 'dppo-topk-tv']
    """
    if len(names) == 1:
        return list(names)
    words = [name.split("-") for name in names]
    while all(len(one) > 1 and one[0] == words[0][0] for one in words):
        words = [one[1:] for one in words]
    while all(len(one) > 1 and one[-1] == words[0][-1] for one in words):
        words = [one[:-1] for one in words]
    labels = ["-".join(one) for one in words]
    alike = [labels.count(label) > 1 for label in labels]
    return [
        f"{label} ({folder.name})" if two else label for label, two, folder in zip(labels, alike, folders, strict=True)
    ]


def read_json(file: Path) -> Any:
    """Reads a small JSON file. Returns None if it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None

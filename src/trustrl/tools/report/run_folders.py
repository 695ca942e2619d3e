"""Run directories as a report reads them: recipe, metrics, and status.

Only `recipe.toml` must exist. Any other file may be missing or incomplete.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError, RecordError
from trustrl.recording.record_files import RECORDS
from trustrl.runner.directory import RunDirectory
from trustrl.runner.grid import LAST_WORDS
from trustrl.runs.run import Run, RunSettings, Status

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
    return [_run(*one) for one in zip(folders, recipes, strict=True)]


def _run(folder: Path, recipe: dict[str, Any]) -> Run:
    directory = RunDirectory(folder)
    rows, evaluations = (_ordered(directory.rows(name)) for name in ("metrics", "evaluation"))
    result = directory.result() if directory.finished else {}
    status, words = _ending(folder, finished=directory.finished)

    def of(table, key):
        found = recipe.get(table)
        return found.get(key) if isinstance(found, Mapping) else None

    return Run(
        path=str(folder), name=str(recipe.get("name", folder.name)), source="trustrl run directory",
        settings=RunSettings(
            engine=of("engine", "name"), model=of("model", "name"), region=recipe.get("region"),
            steps_planned=of("schedule", "steps"), updates_per_batch=updates_per_batch(recipe),
        ),
        rows=rows, evaluations=evaluations, recipe=recipe, status=status, seconds=result.get("seconds"),
        last_words=words, records=(str(folder / RECORDS),) if (folder / RECORDS).is_dir() else (),
    )


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


def read_json(file: Path) -> Any:
    """Reads a small JSON file. Returns None if it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None

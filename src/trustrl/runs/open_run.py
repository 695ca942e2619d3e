"""Opens a run directory of `trustrl run`."""

import tomllib
from pathlib import Path

from trustrl.errors import ConfigError, RecordError
from trustrl.recording.record_files import RECORDS
from trustrl.runner.directory import RunDirectory
from trustrl.runs.run import Run, RunSettings


def open_run(path: str | Path) -> Run:
    """Reads a run directory.

    Raises:
        ConfigError: If the folder is not a run directory.
        RecordError: If a file cannot be read.
    """
    folder = Path(path)
    if not (folder / "recipe.toml").is_file():
        raise ConfigError(
            f"RUN must be a run directory that `trustrl run` created, got {folder}, which has no recipe.toml."
        )
    try:
        recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise RecordError(f"{folder / 'recipe.toml'} must be valid TOML, got {error}.") from None
    directory = RunDirectory(folder)
    engine, records = recipe["engine"]["name"], folder / RECORDS
    settings = RunSettings(
        engine=engine, updates_per_batch=recipe["schedule"]["updates_per_batch"],
        learning_rate=recipe["optimiser"]["learning_rate"], trainer_dtype=recipe["model"].get("dtype", "float32"),
        sampler_dtype=recipe["sampler"].get("dtype", "float32"),
    )  # fmt: skip
    return Run(
        path=str(path), name=recipe["name"], source="trustrl run directory", settings=settings,
        rows=directory.rows("metrics"), evaluations=directory.rows("evaluation"),
        row_is="batch" if engine == "verl" else "update", records=(str(records),) if records.is_dir() else (),
    )  # fmt: skip

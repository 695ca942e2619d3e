"""Trackio's SQLite databases, one for each project, and the Parquet files that it exports them to."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trustrl.errors import MissingPackageError
from trustrl.files import LARGEST, open_regular, parsed_json
from trustrl.limits import OverLimit
from trustrl.optional_imports import need
from trustrl.recording.decoded_size import check_rows
from trustrl.runs.engine_settings import settings_of
from trustrl.runs.part import Part
from trustrl.runs.points import Points, step_number
from trustrl.runs.readers import sqlite_files, trl_completions
from trustrl.runs.readers.files import Files, chosen_name, first_line

NAME = "Trackio database"
LOOKS_FOR = "<project>.db of Trackio"

_OWN = ("id", "run_id", "timestamp", "run_name", "step", "log_id", "space_id")
_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def read(files: Files) -> list[Part]:
    """Returns the run of a database. Append `::<name of the run>` to the path if it has several.

    Raises:
        ConfigError: If no run is named and there are several, or the named run is not there.
    """
    parts: list[Part] = []
    for file in files.matching("*.db", "*/*.db"):
        if {"metrics", "configs"} <= sqlite_files.tables(file):
            parts.append(_read(files, file, _database))
    if not parts and len(files.names) == 1:
        parts = [_read(files, file, _exported) for file in files.matching("*.parquet") if _is_export(file)]
    return parts


def _read(files: Files, file: Path, rows_of: Any) -> Part:
    part = Part(source=NAME)
    runs: dict[str, Points] = {}
    configs: dict[str, Any] = {}
    try:
        for run, step, metrics in rows_of(file, configs):
            points = runs.setdefault(run, Points())
            if step is None or not isinstance(metrics, Mapping):
                part.faults.append(f"{files.short(file)}: a row of {run} is not a step with metrics; left out")
                continue
            points.add(step, {name: _WORDS.get(v, v) if isinstance(v, str) else v for name, v in metrics.items()})
    except (*sqlite_files.DAMAGE, *trl_completions.DAMAGE) as error:
        part.faults.append(f"{files.short(file)}: {first_line(error)}; the rest is left out")
    name = chosen_name(files, list(runs), f"{files.short(file)} has several runs")
    if name is not None:
        part.name = name
        part.take(runs[name], files.short(file))
        engine, part.settings = settings_of(configs.get(name) or {})
        if engine:
            part.engine = part.engine or engine
            part.found.append(f"settings in the configuration stored in {files.short(file)}")
    return part


def _database(file: Path, configs: dict[str, Any]) -> Iterator[tuple[str, int | None, Any]]:
    with sqlite_files.opened(file) as database:
        for run, config in database.rows("configs", ("run_name", "config")):
            settings = _object(config)
            if isinstance(settings, Mapping):
                configs[str(run)] = settings
        for run, step, metrics in database.rows("metrics", ("run_name", "step", "metrics"), "order by rowid"):
            yield str(run), step_number(step), _object(metrics)


def _object(text: Any) -> Any:
    try:
        return parsed_json(text)
    except OverLimit:
        raise
    except (ValueError, TypeError):
        return None


def _is_export(file: Path) -> bool:
    try:
        with open_regular(file) as opened:
            names = need("pyarrow.parquet", extra="records").read_schema(opened).names
    except (MissingPackageError, *trl_completions.DAMAGE):
        return False
    return {"run_name", "step", "timestamp"} <= set(names)


def _exported(file: Path, configs: dict[str, Any]) -> Iterator[tuple[str, int | None, Any]]:
    """Yields the rows of `<project>.parquet`, which has a column for each metric."""
    parquet = need("pyarrow.parquet", extra="records")
    beside = file.with_name(f"{file.stem}_configs.parquet")
    if beside.is_file():
        for row in trl_completions.whole_table(beside, parquet).to_pylist():
            configs[str(row.get("run_name"))] = {key: value for key, value in row.items() if value is not None}
    with open_regular(file, LARGEST) as opened:
        check_rows(opened)
        for batch in parquet.ParquetFile(opened, pre_buffer=False).iter_batches(use_threads=False):
            for row in batch.to_pylist():
                metrics = {name: value for name, value in row.items() if name not in _OWN and value is not None}
                yield str(row["run_name"]), step_number(row["step"]), metrics

"""MLflow's stores: the SQLite database, and the folder of one run in a file store (`mlruns/<experiment>/<run>`)."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trustrl.errors import RecordError
from trustrl.files import lines_of, open_regular
from trustrl.limits import Meter
from trustrl.runs.engine_settings import settings_of
from trustrl.runs.part import Part
from trustrl.runs.points import Points, number, step_number
from trustrl.runs.readers import sqlite_files
from trustrl.runs.readers.files import MOST_DAMAGE, Files, chosen_name, files_of, first_line, opening
from trustrl.runs.run import Status

NAME = "MLflow store"
LOOKS_FOR = "mlflow.db, or meta.yaml with metrics/ and params/"

_LARGEST = 1.79e308
"""MLflow's database stores infinity as the largest finite number."""

_STATUS: dict[str, Status] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "failed", "RUNNING": "unfinished",
                              "3": "finished", "4": "failed", "5": "failed", "1": "unfinished"}  # fmt: skip
_META = re.compile(r"^(run_name|status): '?([^'\n]*)'?$", re.MULTILINE)


def read(files: Files) -> list[Part]:
    """Returns the run of a store. Append `::<name of the run>` to the path of a database if it has several.

    Raises:
        ConfigError: If no run is named and there are several, or the named run is not there.
    """
    databases = [file for file in files.matching("*.db", "*/*.db") if {"runs", "params"} <= sqlite_files.tables(file)]
    stores = files.matching(*(f"{'*/' * depth}meta.yaml" for depth in range(4)))
    runs = [file.parent for file in stores if (file.parent / "metrics").is_dir() and (file.parent / "params").is_dir()]
    names = {_about(run).get("run_name", run.name) if len(runs) > 1 else run.name: run for run in runs}
    chosen = chosen_name(files, list(names), f"{files.root} has several MLflow runs")
    return [
        *(_database(files, file) for file in databases),
        *([] if chosen is None else [_folder(files, names[chosen])]),
    ]


def _database(files: Files, file: Path) -> Part:
    part, points, params = Part(source=NAME), Points(), dict[str, Any]()
    try:
        with sqlite_files.opened(file) as database:
            runs = database.rows("runs", ("run_uuid", "name", "status"), "where lifecycle_stage = 'active'")
            choices = {f"{name or uuid}": (uuid, status) for uuid, name, status in runs}
            name = chosen_name(files, list(choices), f"{files.short(file)} has several runs")
            if name is None:
                return part
            part.name, (uuid, status) = name, choices[name]
            part.status = _STATUS.get(str(status), "unknown")
            params |= database.rows("params", ("key", "value"), "where run_uuid = ?", (uuid,))
            columns = ("timestamp", "key", "value", "step", "is_nan")
            meter, rows = Meter(f"{files.short(file)}: its metrics"), list[tuple[Any, ...]]()
            for row in database.rows("metrics", columns, "where run_uuid = ?", (uuid,)):
                meter.add(300 + len(str(row[1])))
                rows.append(row)
            rows.sort(key=lambda row: number(row[0]) or 0)  # SQLite would sort in a file of unknown size
            for _, key, value, step, is_nan in rows:
                if (whole_step := step_number(step)) is not None:
                    lost = is_nan or not isinstance(value, (int, float)) or abs(value) > _LARGEST
                    points.add(whole_step, {str(key): math.nan if lost else value})
    except (RecordError, *sqlite_files.DAMAGE) as error:
        part.faults.append(f"{files.short(file)}: {first_line(error)}; the rest is left out")
    _take(part, points, params, files.short(file))
    return part


def _take(part: Part, points: Points, params: dict[str, Any], where: str) -> None:
    part.take(points, where)
    engine, part.settings = settings_of(params)
    if engine:
        part.engine = part.engine or engine
        part.found.append(f"settings in the parameters stored in {where}")


def _about(folder: Path) -> dict[str, str]:
    return dict(_META.findall(opening(folder / "meta.yaml").decode("utf-8", errors="replace")))


def _take_metric(points: Points, name: str, file: Path, short: str) -> Iterator[str]:
    """Adds the values of one metric from its file. Yields the faults of the file."""
    damaged = 0
    try:
        with open_regular(file) as opened:
            for line_number, line in enumerate(lines_of(opened), 1):
                if not line.endswith(b"\n"):
                    yield f"{short}: the last line is truncated; left out"
                    break
                try:
                    step, value = _point(line)
                except ValueError:
                    yield f"{short}, line {line_number}: not a time, a value and a step; left out"
                    damaged += 1
                    if damaged == MOST_DAMAGE:
                        yield f"{short}: {damaged:,} lines are damaged; the rest is left out"
                        break
                else:
                    points.add(step, {name: value})
    except OSError as error:
        yield f"{short}: {error.strerror}; left out"


def _point(line: bytes) -> tuple[int, float]:
    _, value, text, *_ = line.rstrip(b"\n").split(b" ")  # the time comes first
    if (step := step_number(float(text))) is None:
        raise ValueError(text)
    return step, float(value)


def _folder(files: Files, folder: Path) -> Part:
    part, points, params, about = Part(source=NAME), Points(), dict[str, Any](), _about(folder)
    part.name, part.status = about.get("run_name"), _STATUS.get(about.get("status", ""), "unknown")
    listed = [folder / name for name in files_of(folder).names]
    for file in (path for path in listed if path.parent == folder / "params"):
        params[file.name] = opening(file).decode("utf-8", errors="replace")
    for file in (path for path in listed if path.is_relative_to(folder / "metrics")):
        name = file.relative_to(folder / "metrics").as_posix()
        part.faults += _take_metric(points, name, file, files.short(file))
    _take(part, points, params, files.short(folder))
    return part

"""Metrics as a table with a column for the step, exported from a tracker or logged: CSV, JSON or JSON Lines."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trustrl.files import lines_of, open_regular, parsed_json, read_regular, why_not_json
from trustrl.limits import Meter
from trustrl.runs.part import Part
from trustrl.runs.readers.files import Fault, Files, json_lines
from trustrl.runs.readers.wandb_offline import STEPS, by_step

NAME = "exported history"
LOOKS_FOR = "*.csv, *.json or *.jsonl with a column step, _step, Step or train/global_step"

LARGEST_LINE = 8_000_000
"""Bytes of the largest line of a CSV file."""

_STEP = (*STEPS, "step", "Step", "global_step")


def read(files: Files) -> list[Part]:
    """Returns the history, if the path is such a file or the folder has exactly one; else the first's faults."""
    candidates = files.matching("*.csv", "*.json", "*.jsonl")
    parts = [part for file in candidates if (part := history(files, file, Part(source=NAME))) is not None]
    histories = [part for part in parts if part.rows or part.evaluations]
    return histories if len(histories) == 1 else [] if histories else parts[:1]


def history(files: Files, file: Path, part: Part) -> Part | None:
    """Returns the part with the metrics of one file, or None if it is a table of something else."""
    short = files.short(file)
    kept, meter = list[dict[str, Any]](), Meter(f"{short}: its rows")
    rows = {".csv": _csv, ".json": _json}.get(file.suffix, json_lines)
    for row in rows(file, short):
        if isinstance(row, Fault):
            part.faults.append(row.text)
            continue
        row_number, entry = row
        key = next((name for name in _STEP if name in entry), None) if isinstance(entry, Mapping) else None
        if key is None:
            if not kept:
                return None  # a table of something else
            part.faults.append(f"{short}, row {row_number}: no step; left out")
            continue
        numbers = {name: value for name, value in entry.items() if value is None or isinstance(value, (int, float))}
        meter.add(200 + 100 * len(numbers) + sum(map(len, numbers)))
        kept.append({**numbers, "_step": numbers.get(key)} if key not in STEPS else numbers)
        kept[-1].pop(key if key not in STEPS else "", None)
    if kept:
        part.take(by_step(kept), short)
    return part if part.rows or part.evaluations or part.faults else None


def _csv(file: Path, short: str) -> Iterator[tuple[int, dict[str, Any]] | Fault]:
    """Yields the rows of a CSV file. A column of W&B's panels is named `<run> - <metric>`."""
    try:
        with open_regular(file) as opened:
            lines = (line.decode("utf-8", errors="replace") for line in lines_of(opened, LARGEST_LINE))
            for row_number, row in enumerate(csv.DictReader(lines), 2):
                if None in row or None in row.values():
                    yield Fault(f"{short}, row {row_number}: not as many values as columns; left out")
                    continue
                yield (
                    row_number,
                    {name.rpartition(" - ")[2]: _number(value) for name, value in row.items() if value != ""},
                )
    except (OSError, csv.Error) as error:
        yield Fault(f"{short}: {error}; the rest is left out")


def _number(text: Any) -> Any:
    try:
        return float(text)
    except (ValueError, TypeError):
        return text


def _json(file: Path, short: str) -> Iterator[tuple[int, Any] | Fault]:
    """Yields the rows of a JSON file: a list of objects, or an object of columns."""
    try:
        content = parsed_json(read_regular(file))
    except OSError as error:
        yield Fault(f"{short}: {error.strerror}; left out")
        return
    except ValueError as error:
        yield Fault(f"{short}: {why_not_json(error)}; left out")
        return
    if isinstance(content, dict) and all(isinstance(column, Mapping) for column in content.values()):
        content = _from_columns(content)  # as pandas.DataFrame.to_json writes it
    yield from enumerate(content if isinstance(content, list) else [], 1)


def _from_columns(columns: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name, column in columns.items():
        for key, value in column.items():
            rows.setdefault(key, {})[name] = value
    return list(rows.values())

"""Metrics as a table with a column for the step, exported from a tracker or logged: CSV, JSON or JSON Lines."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trustrl.runs.part import Part
from trustrl.runs.readers.files import Fault, Files, json_lines
from trustrl.runs.readers.wandb_offline import STEPS, by_step
from trustrl.untrusted_files import lines_of, open_regular, parsed_json, read_regular

NAME = "exported history"
LOOKS_FOR = "*.csv, *.json or *.jsonl with a column step, _step, Step or train/global_step"

_STEP = (*STEPS, "step", "Step", "global_step")


def read(files: Files) -> list[Part]:
    """Returns the history, if the path is such a file or the folder has exactly one."""
    candidates = files.matching("*.csv", "*.json", "*.jsonl")
    found = [part for file in candidates if (part := history(files, file, Part(source=NAME))) is not None]
    return found if len(found) == 1 else []


def history(files: Files, file: Path, part: Part) -> Part | None:
    """Returns the part with the metrics of one file, or None if it is a table of something else."""
    short = files.short(file)
    kept = list[dict[str, Any]]()
    rows = {".csv": _csv, ".json": _json}.get(file.suffix, json_lines)
    for row in rows(file, short):
        if isinstance(row, Fault):
            part.faults.append(row.text)
            continue
        at, entry = row
        key = next((name for name in _STEP if name in entry), None) if isinstance(entry, Mapping) else None
        if key is None:
            if not kept:
                return None  # a table of something else
            part.faults.append(f"{short}, row {at}: no step; left out")
            continue
        kept.append({**entry, "_step": entry[key]} if key not in STEPS else dict(entry))
        kept[-1].pop(key if key not in STEPS else "", None)
    if not kept:
        return None
    part.take(by_step(kept), short)
    return part if part.rows or part.evaluations else None


def _csv(file: Path, short: str) -> Iterator[tuple[int, dict[str, Any]] | Fault]:
    """Yields the rows of a CSV file. A column of W&B's panels is named `<run> - <metric>`."""
    try:
        with open_regular(file) as opened:
            lines = (line.decode("utf-8", errors="replace") for line in lines_of(opened))
            for at, row in enumerate(csv.DictReader(lines), 2):
                if None in row or None in row.values():
                    yield Fault(f"{short}, row {at}: not as many values as columns; left out")
                    continue
                yield at, {name.rpartition(" - ")[2]: _number(value) for name, value in row.items() if value != ""}
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
        found = parsed_json(read_regular(file))
    except OSError as error:
        yield Fault(f"{short}: {error.strerror}; left out")
        return
    except ValueError as error:
        yield Fault(f"{short}: not valid JSON ({str(error)[:60]}); left out")
        return
    if isinstance(found, dict) and all(isinstance(column, Mapping) for column in found.values()):
        found = _from_columns(found)  # as pandas.DataFrame.to_json writes it
    yield from enumerate(found if isinstance(found, list) else [], 1)


def _from_columns(columns: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name, column in columns.items():
        for key, value in column.items():
            rows.setdefault(key, {})[name] = value
    return list(rows.values())

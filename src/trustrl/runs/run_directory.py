"""Run directory as `trustrl run` wrote it: settings, metrics and result, checked while they are read. No torch."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from trustrl.errors import RecordError
from trustrl.files import LARGEST, finite, leads_out, lines_of, open_regular, parsed_json
from trustrl.limits import Meter

NEEDED = {"metrics": ("step",), "evaluation": ("step", "accuracy")}
"""Keys that every object of a file must have."""

WRITTEN = "must be JSON as `trustrl run` writes it"
LAST_WORDS = 5
"""Lines at the end of a failed run's log that are shown."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The directory of a run, for reading. `trustrl.runner.directory.RunDirectory` writes it."""

    path: Path

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

    def rows(self, name: str = "metrics") -> list[dict[str, Any]]:
        """Returns the objects of `<name>.jsonl`. Skips an incomplete last line, which a killed process leaves.

        Raises:
            RecordError: If a line is not an object with a step and numbers.
        """
        file = self.path / f"{name}.jsonl"
        if not file.exists():
            return []
        rows, meter = list[dict[str, Any]](), Meter(f"{file} must hold fewer rows: they")
        with _reading(file) as opened:
            for number, line in enumerate(lines_of(opened), 1):
                if line.endswith(b"\n"):
                    rows.append(_row(f"{file}, line {number},", line[:-1], NEEDED[name]))
                    meter.add(200 + sum(150 + len(key) for key in rows[-1]))
        return rows

    def result(self) -> dict[str, Any]:
        """Returns the result.

        Raises:
            RecordError: If the file is not a JSON object, or its `seconds` is not a number.
        """
        file = self.path / "result.json"
        with _reading(file) as opened:
            result = _object(str(file), opened.read())
        _check_number(str(file), result, "seconds")
        return result


def checked_rows(run: StoredRun, name: str = "metrics") -> list[dict[str, Any]]:
    """Returns the objects of `<name>.jsonl`, in order of steps. An incomplete last line is left out."""
    file = run.path / f"{name}.jsonl"
    check_file(file)
    rows = run.rows(name)
    for line, row in enumerate(rows, 1):
        if not 0 <= row["step"] < 2**53:
            raise RecordError(f"{file}, line {line}, must have a step from 0 to 2^53, got {row['step']}.")
    return sorted(rows, key=lambda row: row["step"])


def checked_result(run: StoredRun) -> dict[str, Any]:
    """Returns the result of a finished run, or nothing.

    Raises:
        RecordError: If result.json is not a regular file inside the directory, or not an object.
    """
    check_file(run.path / "result.json")
    return run.result() if run.finished else {}


def check_file(file: Path) -> None:
    """Checks that a file of a run, if it exists, is a regular one inside its folder and not too large."""
    if file.is_symlink() and leads_out(file, file.parent):
        raise RecordError(f"{file} must be in the folder itself, got a link that leads out of it.")
    try:
        with open_regular(file, LARGEST):
            pass
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(f"{file} must be a readable file, got: {error.strerror}.") from None


@contextmanager
def _reading(file: Path) -> Iterator[IO[bytes]]:
    try:
        with open_regular(file, LARGEST) as opened:
            yield opened
    except OSError as error:
        raise RecordError(f"{file} must be a readable file, got: {error.strerror}.") from None


def _object(where: str, text: bytes) -> dict[str, Any]:
    try:
        value = parsed_json(text)
    except ValueError as error:
        got = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise RecordError(f"{where} {WRITTEN}, got: {got}.") from None
    if not isinstance(value, dict):
        raise RecordError(f"{where} {WRITTEN}, got a value that is not an object.")
    return value


def _row(where: str, text: bytes, needed: Sequence[str]) -> dict[str, Any]:
    row = finite(_object(where, text))
    for name in needed:
        if name not in row:
            raise RecordError(f"{where} {WRITTEN}, got an object without {name}.")
    for name in row:
        _check_number(where, row, name)
    if not isinstance(row["step"], int):
        raise RecordError(f"{where} {WRITTEN}, got {row['step']!r} as step, which must be an integer.")
    return row


def _check_number(where: str, row: Mapping[str, Any], name: str) -> None:
    value = row.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise RecordError(f"{where} {WRITTEN}, got {value!r:.60} as {name!r:.60}, which must be a number or null.")

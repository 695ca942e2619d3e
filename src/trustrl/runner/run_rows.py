"""Metrics, evaluations and result of a run directory from outside, with every bound checked before it is used."""

from pathlib import Path
from typing import Any

from trustrl.errors import RecordError
from trustrl.runner.directory import RunDirectory
from trustrl.untrusted_files import LARGEST, leads_out, open_regular


def checked_rows(directory: RunDirectory, name: str = "metrics") -> list[dict[str, Any]]:
    """Returns the objects of `<name>.jsonl`, in order of steps. An incomplete last line is left out.

    Raises:
        RecordError: If the file is not a regular one inside the directory, or too large, or a line is not an object
            with a step from 0 and numbers.
    """
    file = directory.path / f"{name}.jsonl"
    check_file(file)
    rows = directory.rows(name)
    for at, row in enumerate(rows, 1):
        if not 0 <= row["step"] < 2**53:
            raise RecordError(f"{file}, line {at}, must have a step from 0 to 2^53, got {row['step']}.")
    return sorted(rows, key=lambda row: row["step"])


def checked_result(directory: RunDirectory) -> dict[str, Any]:
    """Returns the result of a finished run, or nothing.

    Raises:
        RecordError: If result.json is not a regular file inside the directory, or not an object.
    """
    check_file(directory.path / "result.json")
    return directory.result() if directory.finished else {}


def check_file(file: Path) -> None:
    """Checks that a file of a run, if it exists, is a regular one inside its folder and not too large.

    Raises:
        RecordError: If it is not.
    """
    if file.is_symlink() and leads_out(file, file.parent):
        raise RecordError(f"{file} must be in the folder itself, got a link that leads out of it.")
    try:
        with open_regular(file, LARGEST):
            pass
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(f"{file} must be a readable file, got: {error.strerror}.") from None

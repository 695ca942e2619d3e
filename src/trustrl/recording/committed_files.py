"""Files of a record that a checkpoint covers: their listing at the commit, and their check on resume. No torch.

A run calls `files_of_steps` when it commits a checkpoint, and `fault_of_file` for each of these files when it resumes.
The layout of a record is known here alone, so a part that compaction replaced is not taken for a lost one. Compaction
must bring its file and the folder to the disk before it removes a part.
"""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from trustrl.files import hashed, open_regular
from trustrl.recording.checksums import checked_file
from trustrl.recording.record_files import SEQUENCES, TEXTS, dump_name, named_numbers, part_name

COMPACTED = re.compile(r"steps-([0-9]{8,18})-([0-9]{8,18})\.rank-([0-9]{4,9})\.parquet")
"""Name of a file that replaces the parts of several steps: its first and last step, and the rank."""


def files_of_steps(folder: Path, steps: range, ranks: int) -> dict[str, Path]:
    """Returns the complete files that hold these steps, by their path in the record.

    Asks for each name in turn. The time follows the number of steps asked for, and not the length of the run, as it
    would if the folder were listed.

    Args:
        folder: Folder of a record on this machine.
        steps: Steps as the record counts them.
        ranks: Number of processes that may record.
    """
    names = [f"{inside}{part_name(step, rank)}" for step in steps for rank in range(ranks) for inside in _TABLES]
    files = {name: path for name in names if (path := folder / name).is_file()}
    for step in steps:
        dump = folder / dump_name(step)
        if dump.is_dir():
            inside_dump = (path for path in sorted(dump.iterdir()) if path.is_file() and not path.name.startswith("."))
            files |= {f"{dump.name}/{path.name}": path for path in inside_dump}
    return files


_TABLES = ("", f"{SEQUENCES}/", f"{TEXTS}/")


def fault_of_file(folder: Path, name: str, listed: Mapping[str, Any]) -> str | None:
    """Returns the fault of a file that a checkpoint covers, or None if the record still holds its rows.

    Args:
        folder: Folder of the record.
        name: Path of the file in the record.
        listed: Its bytes and SHA-256 when the checkpoint was written.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return "is not in the record"
    try:
        current = hashed(folder / name)
    except FileNotFoundError:
        return _fault_of_compacted(folder / path.parent, path.name)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if current["bytes"] != listed["bytes"]:
        return f"has {current['bytes']:,} bytes, but {listed['bytes']:,} were committed"
    return None if current == listed else "has changed since it was committed"


def _fault_of_compacted(folder: Path, name: str) -> str | None:
    """Returns the fault of the file that replaced a missing part, or "is missing" if none did."""
    step, rank = named_numbers(name) or (-1, -1)
    for path in sorted(folder.glob("steps-*.parquet")):
        match = COMPACTED.fullmatch(path.name)
        if match and int(match[1]) <= step <= int(match[2]) and int(match[3]) == rank:
            return _checksum_fault(path)
    return "is missing"


def _checksum_fault(path: Path) -> str | None:
    """Reads a whole Parquet file and compares it with its own checksums."""
    try:
        with open_regular(path) as opened:
            source, _, has_checksums = checked_file(opened)
            while has_checksums and source.read(1 << 20):
                pass
    except OSError as error:
        return f"was replaced by {path.name}, which is damaged: {error}"
    return None if has_checksums else f"was replaced by {path.name}, which has no checksums"

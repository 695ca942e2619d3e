"""Files of a record that a checkpoint covers: their listing at the commit, and their check on resume. No torch.

A run calls `files_of_steps` when it commits a checkpoint, and `fault_of_file` for each of these files when it resumes.
The layout of a record is known here alone, so a part file that was merged into another is not taken for a lost one.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from trustrl.files import hashed, open_regular
from trustrl.recording.checksums import checked_file
from trustrl.recording.part_names import PartName, dump_name
from trustrl.recording.record_files import SEQUENCES, TEXTS
from trustrl.recording.writers import WRITERS, Claims, listed


def files_of_steps(folder: Path, steps: range) -> dict[str, Path]:
    """Returns the complete files that hold these steps, by their path in the record, and the claims of their writers.

    Lists the folders, whose files stay few however long the run is, because those of ended steps are merged.
    """
    claims = Claims.of(folder)
    files = {f"{WRITERS}/{claim.name}": folder / WRITERS / claim.name for claim in claims if claim.from_step in steps}
    for inside in ("", f"{SEQUENCES}/", f"{TEXTS}/"):
        for part in claims.sift(listed(folder / inside)).visible:
            if part.first < steps.stop and part.last >= steps.start:
                files[f"{inside}{part}"] = folder / inside / str(part)
    for step in steps:
        dump = folder / dump_name(step)
        if dump.is_dir():
            inside_dump = (path for path in sorted(dump.iterdir()) if path.is_file() and not path.name.startswith("."))
            files |= {f"{dump.name}/{path.name}": path for path in inside_dump}
    return files


def fault_of_file(folder: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    """Returns the fault of a file that a checkpoint covers, or None if the record still holds its rows."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return "is not in the record"
    try:
        current = hashed(folder / name)
    except FileNotFoundError:
        return _fault_of_merged(folder / path.parent, PartName.of(path.name))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if current["bytes"] != entry["bytes"]:
        return f"has {current['bytes']:,} bytes, but {entry['bytes']:,} were committed"
    return None if current == entry else "has changed since it was committed"


def _fault_of_merged(folder: Path, part: PartName | None) -> str | None:
    """Returns the fault of the file into which a missing part was merged, or "is missing" if there is none."""
    if part is not None:
        for other, path in listed(folder, part.rank).items():
            if other.covers(part):
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
        return f"was merged into {path.name}, which is damaged: {error}"
    return None if has_checksums else f"was merged into {path.name}, which has no checksums"

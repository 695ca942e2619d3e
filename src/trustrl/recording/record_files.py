"""Record files on disk: their names, cleanup before a process writes, and opening them with pyarrow. No torch."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trustrl.errors import RecordError
from trustrl.optional_imports import need
from trustrl.recording.schema import COLUMNS, REGION_KEY, VERSION, VERSION_KEY, arrow_schema

RECORDS = "records"
"""Name of the records directory inside a run directory."""

NAMES = tuple(column.name for column in COLUMNS)


def part_name(step: int, rank: int) -> str:
    """Returns the file name for one step on one rank."""
    return f"step-{step:08d}.rank-{rank:04d}.parquet"


def parts_in(folder: Path) -> list[Path]:
    """Returns the part files directly in a directory, by step and rank. Dumps are subdirectories."""
    return sorted(folder.glob("step-*.parquet"))


def part_files(path: str | Path) -> list[Path]:
    """Returns the file itself, or all part files of a directory by step and rank, without those in dumps.

    Raises:
        RecordError: If no such file exists.
    """
    path = Path(path)
    files = parts_in(path) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise RecordError(
            f"No records found at `{path}`. Pass a Parquet file written by trustrl.recording, or a directory of them."
        )
    return files


def dump_name(step: int) -> str:
    """Returns the name of the directory for the dump of a trigger that fired at this step."""
    return f"dump-{step:08d}"


def about_name(rank: int) -> str:
    """Returns the name of the file that describes why a dump was written."""
    return f"trigger.rank-{rank:04d}.json"


def remove_unfinished(folder: Path, rank: int) -> None:
    """Deletes temporary files that a killed process of this rank left behind."""
    for path in folder.rglob(f".*.rank-{rank:04d}.*.tmp"):
        path.unlink(missing_ok=True)


def remove_from(folder: Path, step: int, rank: int) -> None:
    """Deletes this rank's files of a step and of all later steps, including those in dumps written since that step."""
    for path in folder.glob(f"step-*.rank-{rank:04d}.parquet"):
        if path.name >= part_name(step, rank):
            path.unlink()
    for dump in folder.glob("dump-*"):
        if dump.name >= dump_name(step):
            for path in dump.glob(f"*.rank-{rank:04d}.*"):
                path.unlink()
            with suppress(OSError):  # it holds other ranks' files, or another rank has just removed it
                dump.rmdir()


def read_table(file: Path, columns: Sequence[str] = NAMES) -> tuple[Any, dict[str, Any]]:
    """Returns the file's table, or some of its columns, and the settings of the region that decided.

    Raises:
        RecordError: If trustrl did not write the file, a newer trustrl wrote it, or it is incomplete.
        MissingPackageError: If pyarrow is not installed.
    """
    with opened(file) as (parquet, region):
        present = [name for name in columns if name in parquet.schema_arrow.names]
        table = parquet.read(present).replace_schema_metadata(None)
    pa, schema = need("pyarrow", extra="records"), arrow_schema()
    for name in columns:
        if name not in present:  # added to the schema after the file was written
            table = table.append_column(schema.field(name), pa.nulls(len(table), schema.field(name).type))
    return table.select(list(columns)), region


@contextmanager
def opened(file: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Opens a part file as a `pyarrow.parquet.ParquetFile` and yields it with its region's settings.

    Reads only the footer.

    Raises:
        RecordError: If trustrl did not write the file, a newer trustrl wrote it, or it proves broken while being read.
        MissingPackageError: If pyarrow is not installed.
    """
    pa, pq = need("pyarrow", extra="records"), need("pyarrow.parquet", extra="records")
    try:
        with pq.ParquetFile(file) as parquet:
            yield parquet, _checked_region(file, parquet.schema_arrow)
    except (pa.ArrowException, OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        got = str(error).rstrip(".")
        raise RecordError(
            f"`{file}` must be a complete Parquet file written by trustrl.recording, got: {got}."
        ) from error


def _checked_region(file: Path, found: Any) -> dict[str, Any]:
    """Checks the schema that was found and returns the region's settings from its metadata."""
    metadata = found.metadata or {}
    version = _checked_version(file, metadata.get(VERSION_KEY))
    expected = arrow_schema()
    for name in (column.name for column in COLUMNS if column.since <= version):
        wanted = expected.field(name).type
        if name not in found.names or found.field(name).type != wanted:
            got = found.field(name).type if name in found.names else "no such column"
            raise RecordError(f"`{file}` must have a column {name} of type {wanted}, got {got}.")
    region = json.loads(metadata.get(REGION_KEY, b""))
    if not isinstance(region, dict):
        raise RecordError(f"`{file}` must contain its region's settings as a JSON object, got {region!r}.")
    return region


def _checked_version(file: Path, given: bytes | None) -> int:
    if given is None or not given.isdigit():
        got = "a Parquet file without a schema version" if given is None else f"schema version {given!r}"
        raise RecordError(f"`{file}` must be written by trustrl.recording, got {got}.")
    if int(given) > VERSION:
        raise RecordError(
            f"`{file}` must have schema version {VERSION} or lower, got {int(given)}. Install a newer trustrl."
        )
    return int(given)

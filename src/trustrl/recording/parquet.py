"""Files of records as pyarrow has them, after a look at who wrote them. No torch."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trustrl.errors import RecordError
from trustrl.packages import need
from trustrl.recording.files import parts_in
from trustrl.recording.schema import COLUMNS, REGION_KEY, VERSION, VERSION_KEY, arrow_schema

NAMES = tuple(column.name for column in COLUMNS)


def part_files(path: str | Path) -> list[Path]:
    """The file itself, or all part files of a folder by step and rank; dumps are folders of their own.

    Raises:
        RecordError: there is none.
    """
    path = Path(path)
    files = parts_in(path) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise RecordError(f"`{path}` must be a file of records or a folder with some, got none. See trustrl.recording.")
    return files


def read_table(file: Path, columns: Sequence[str] = NAMES) -> tuple[Any, dict[str, Any]]:
    """The file's table, or some of its columns, and the settings of the region that decided.

    Raises:
        RecordError: the file is not of ours, not whole, or of a newer trustrl.
        MissingPackageError: pyarrow is not installed.
    """
    with opened(file) as (parquet, region):
        return parquet.read(list(columns)).replace_schema_metadata(None), region


@contextmanager
def opened(file: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A part file as a `pyarrow.parquet.ParquetFile`, and its region's settings; only its footer has been read.

    Raises:
        RecordError: it is not of ours, of a newer trustrl, or turns out to be broken while it is read.
        MissingPackageError: pyarrow is not installed.
    """
    pa, pq = need("pyarrow", extra="records"), need("pyarrow.parquet", extra="records")
    try:
        with pq.ParquetFile(file) as parquet:
            found = parquet.schema_arrow
            metadata = found.metadata or {}
            _check_version(file, metadata.get(VERSION_KEY))
            expected = arrow_schema()
            for name in NAMES:
                wanted = expected.field(name).type
                if name not in found.names or found.field(name).type != wanted:
                    got = found.field(name).type if name in found.names else "none"
                    raise RecordError(f"`{file}` must have a column {name} of {wanted}, got {got}.")
            region = json.loads(metadata.get(REGION_KEY, b""))
            if not isinstance(region, dict):
                raise RecordError(f"`{file}` must name its region's settings, got {region!r}.")
            yield parquet, region
    except (pa.ArrowException, OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        got = str(error).rstrip(".")
        raise RecordError(f"`{file}` must be a whole Parquet file of trustrl's records, got: {got}.") from error


def _check_version(file: Path, given: bytes | None) -> None:
    if given is None or not given.isdigit():
        raise RecordError(
            f"`{file}` must be written by trustrl.recording, got a Parquet file "
            f"{'without its mark' if given is None else f'of version {given!r}'}."
        )
    if int(given) > VERSION:
        raise RecordError(
            f"`{file}` must have a schema of version {VERSION} or below, got {int(given)}. Install a newer trustrl."
        )

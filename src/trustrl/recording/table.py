"""One file of records as a pyarrow table, after a look at who wrote it. No torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trustrl.errors import RecordError
from trustrl.packages import need
from trustrl.recording.schema import COLUMNS, REGION_KEY, VERSION, VERSION_KEY, arrow_schema

NAMES = tuple(column.name for column in COLUMNS)


def read_table(file: Path, columns: Sequence[str] = NAMES) -> tuple[Any, dict[str, Any]]:
    """The file's table, or some of its columns, and the settings of the region that decided.

    Raises:
        RecordError: the file is not of ours, not whole, or of a newer trustrl.
        MissingPackageError: pyarrow is not installed.
    """
    pa, pq = need("pyarrow", extra="records"), need("pyarrow.parquet", extra="records")
    try:
        with pq.ParquetFile(file) as opened:
            found = opened.schema_arrow
            metadata = found.metadata or {}
            _check_version(file, metadata.get(VERSION_KEY))
            expected = arrow_schema()
            for name in NAMES:
                wanted = expected.field(name).type
                if name not in found.names or found.field(name).type != wanted:
                    got = found.field(name).type if name in found.names else "none"
                    raise RecordError(f"`{file}` must have a column {name} of {wanted}, got {got}.")
            table = opened.read(list(columns)).replace_schema_metadata(None)
        region = json.loads(metadata.get(REGION_KEY, b""))
    except (pa.ArrowException, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"`{file}` must be a whole Parquet file of trustrl's records, got: {error}.") from error
    if not isinstance(region, dict):
        raise RecordError(f"`{file}` must name its region's settings, got {region!r}.")
    return table, region


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

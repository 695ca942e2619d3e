"""Files of a record: those that count, and opening them with pyarrow. No torch."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from trustrl.errors import RecordError, TrustRLWarning
from trustrl.files import parsed_json, shortened
from trustrl.optional_imports import need
from trustrl.recording import storage
from trustrl.recording.checksums import checked_file, parsed_footer
from trustrl.recording.part_names import FORM, PartName, dump_step
from trustrl.recording.schema import COLUMNS, REGION_KEY, TABLE_KEY, TABLES, VERSION, VERSION_KEY, arrow_schema
from trustrl.recording.storage import Place, Remote, SamePlace
from trustrl.recording.value_checks import first_breach
from trustrl.recording.writers import Claims, Sifted

RECORDS = "records"
"""Name of the records directory inside a run directory."""

RUN = "run.json"
"""Name of the file that describes the run, next to the part files of tokens."""

SEQUENCES, TEXTS = "sequences", "texts"
"""Names of the folders of the other tables, next to the part files of tokens."""

NAMES = tuple(column.name for column in COLUMNS)

WITHOUT_CHECKSUMS = "have no checksums, so damage may go unnoticed. trustrl 0.1, or another program, wrote them."

LARGEST_GROUP = 4 * 2**30
"""Bytes of the largest row group, uncompressed."""

_FIRST_WITHOUT_REGION = 3
"""Version that introduced records without a region."""


class FileGone(RecordError):
    """A part file that was listed is gone: the run still records, and has merged or replaced it."""


Result = TypeVar("Result")


def read_again(load: Callable[[], Result]) -> Result:
    """Returns what a function reads. Lists the files again if a run that still records merged them meanwhile."""
    for _ in range(5):
        with suppress(FileGone):
            return load()
    return load()


def parts_in(folder: SamePlace, inside: str = "") -> list[SamePlace]:
    """Returns the part files directly in a directory that count, by step and rank. Dumps are subdirectories.

    Leaves out files that a later process of the rank replaced, and files whose rows are in a merged file too.

    Args:
        folder: The folder of a record, or of a dump.
        inside: Name of a folder in it, for another table than the tokens.

    Raises:
        RecordError: If a file has another name, or is a link that leads out of the folder, or a claim is damaged.
    """
    files, sifted = sifted_in(folder, inside)
    return [files[part] for part in sifted.visible]


def sifted_in(
    folder: SamePlace, inside: str = "", claims: Claims | None = None
) -> tuple[dict[PartName, SamePlace], Sifted]:
    """Returns the part files directly in a directory, and which of them count. See `parts_in`.

    Args:
        folder: The folder of a record, or of a dump.
        inside: Name of a folder in it, for another table than the tokens.
        claims: The claims of the record, if they are known.
    """
    where = storage.inside(folder, inside) if inside else folder
    files = {}
    for file in storage.entries(where, "step-*.parquet"):
        part = PartName.of(file.name)
        if part is None:
            raise RecordError(f"`{file}` must be named {FORM}. Rename it, or move it out of the folder.")
        files[part] = file
    step = dump_step(folder.name)
    if claims is None:
        claims = Claims.of(folder if step is None else _parent(folder)) if files else Claims()
    return files, claims.sift(files, step=step)


def _parent(dump: Place) -> Place:
    """Returns the folder of the record that a dump is in."""
    if isinstance(dump, Path):
        return dump.parent
    before, mark, query = dump.address.partition("?")
    address = f"{before.rstrip('/').rpartition('/')[0]}{mark}{query}"
    return Remote(address, dump.filesystem, dump.path.rstrip("/").rpartition("/")[0])


def part_files(path: str | PathLike[str] | Remote) -> list[Place]:
    """Returns the file itself, or all part files of a directory by step and rank, without those in dumps.

    Args:
        path: A local path, or an address as `trustrl.recording.storage.place` reads it.

    Raises:
        RecordError: If no such file exists, or the store cannot be read.
        ConfigError: If the address has an unknown scheme.
    """
    where = storage.place(path)
    try:
        is_folder = storage.is_folder(where)
        files = parts_in(where) if is_folder else [where]
        exists = bool(files) if is_folder else storage.is_file(where)
    except OSError as error:
        raise RecordError(f"Cannot read `{where}`: {str(error).rstrip('.')}.") from error
    if not exists:
        raise RecordError(
            f"No records found at `{where}`. Pass a Parquet file written by trustrl.recording, or a directory of them. "
            "To record the next run, call `trustrl.engines.trl.record(trainer)` in TRL, or set TRUSTRL_RECORD in verl."
        )
    return files


def read_table(
    file: Place, columns: Sequence[str] = NAMES, groups: Sequence[int] | None = None
) -> tuple[Any, dict[str, Any] | None]:
    """Returns the file's tokens, or some of their columns, and the settings of the region that decided, if any.

    Args:
        file: The file.
        columns: The columns.
        groups: The row groups to read, in order; −1 is the last. None reads all.

    Raises:
        RecordError: If trustrl did not write the file, a newer trustrl wrote it, or it is incomplete.
        MissingPackageError: If pyarrow is not installed.
    """
    with opened(file) as (parquet, region):
        names = set(parquet.schema_arrow.names)
        table = whole(parquet, file, "tokens", [name for name in columns if name in names], groups)
    return in_todays_schema(table, "tokens", columns), region


def whole(
    parquet: Any, file: Place, table: str, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None
) -> Any:
    """Returns the rows of an opened file, or of some row groups, as a `pyarrow.Table`, checked.

    Raises:
        RecordError: If a row breaks a rule of the specification.
    """
    pa, names = need("pyarrow", extra="records"), None if columns is None else list(columns)
    if groups is None or not parquet.num_row_groups:
        rows = parquet.read(names, use_threads=False)  # apache/arrow#34314
        _check_table(rows, file, table, 0)
        return rows
    sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
    pieces = []
    for group in (group % len(sizes) for group in groups):
        pieces.append(parquet.read_row_group(group, names, use_threads=False))
        _check_table(pieces[-1], file, table, sum(sizes[:group]))
    return pa.concat_tables(pieces)


def _check_table(rows: Any, file: Place, table: str, first: int) -> None:
    for batch in rows.to_batches():
        check_rows(batch, file, table, first)
        first += len(batch)


def check_rows(batch: Any, file: Place, table: str, first: int) -> None:
    """Checks the values of a record batch: nulls, ranges, and the step and rank of the file's name."""
    broken = first_breach(batch, table, PartName.of(file.name))
    if broken is not None:
        rule, row = broken
        raise RecordError(f"`{file}` must {rule}, got row {first + row:,}. Check it with `trustrl records check`.")


def in_todays_schema(table: Any, name: str, columns: Sequence[str]) -> Any:
    """Returns a table of an older version with today's schema. Columns that were added since are null."""
    pa = need("pyarrow", extra="records")
    schema = _todays_schema(name, tuple(columns))
    if table.schema.equals(schema):
        return table.replace_schema_metadata(None)
    names = set(table.column_names)
    arrays = [
        table[field.name] if field.name in names else pa.chunked_array([pa.nulls(len(table), field.type)])
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


@lru_cache(maxsize=16)
def _todays_schema(table: str, columns: tuple[str, ...] | None = None) -> Any:
    """Returns the schema of a table, or of some of its columns."""
    schema = arrow_schema(table=table)
    return schema if columns is None else need("pyarrow", extra="records").schema(map(schema.field, columns))


def by_step(table: Any, files: Sequence[Place]) -> Any:
    """Returns the rows of several files by step and rank. Files of one step have them so; merged files do not."""
    parts = [part for part in (PartName.of(file.name) for file in files) if part is not None]
    if len({part.rank for part in parts}) < 2 or not any(part.is_merged for part in parts):
        return table
    if not {"step", "rank"} <= set(table.column_names):
        return table
    indices = need("pyarrow.compute", extra="records").sort_indices(
        table, sort_keys=[("step", "ascending"), ("rank", "ascending")]
    )
    return table.take(indices)


def groups_with(parquet: Any, columns: Mapping[str, Sequence[int]]) -> list[int]:
    """Returns the row groups of an opened file that may have one of the values in each column, by their statistics."""
    metadata, groups = parquet.metadata, list[int]()
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    for group in range(metadata.num_row_groups):
        stated = (metadata.row_group(group).column(paths.index(name)).statistics for name in columns)
        if all(
            known is None or not known.has_min_max or any(known.min <= value <= known.max for value in values)
            for known, values in zip(stated, columns.values(), strict=True)
        ):
            groups.append(group)
    return groups


@contextmanager
def opened(file: Place, table: str = "tokens") -> Iterator[tuple[Any, dict[str, Any] | None]]:
    """Opens a part file as a `pyarrow.parquet.ParquetFile` and yields it with its region's settings, if it has any.

    Reads only the footer. A remote file fetches the columns of a later read in few large requests. Each column chunk is
    compared with its checksum when it is read. Warns if the file has no checksums, as before release 0.2.

    Raises:
        RecordError: If trustrl did not write the file, a newer trustrl wrote it, or it proves broken while being read.
        MissingPackageError: If pyarrow is not installed.
    """
    pa, pq = need("pyarrow", extra="records"), need("pyarrow.parquet", extra="records")
    try:
        with storage.readable(file) as opened_file:
            source, footer, has_checksums = checked_file(opened_file)
            metadata = parsed_footer(footer)
            with pq.ParquetFile(
                source, metadata=metadata, pre_buffer=isinstance(file, Remote), page_checksum_verification=True
            ) as parquet:
                region = _checked_region(file, parquet.schema_arrow, table)
                _check_layout(file, metadata)
                if not has_checksums:
                    _warn_without_checksums(file)
                yield parquet, region
    except FileNotFoundError as error:
        raise FileGone(
            f"`{file}` must exist. A run that still records has merged or replaced it meanwhile: read the record again."
        ) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:
        got = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise RecordError(
            f"`{file}` must be a complete Parquet file written by trustrl.recording, got: {got}."
        ) from error


def _check_layout(file: Place, metadata: Any) -> None:
    """Checks the numbers of rows and bytes that the footer states."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    if sum(group.num_rows for group in groups) != metadata.num_rows or any(group.num_rows < 0 for group in groups):
        raise RecordError(f"`{file}` must have row groups of {metadata.num_rows} rows in all. The file is damaged.")
    if any(not 0 <= group.total_byte_size <= LARGEST_GROUP for group in groups):
        raise RecordError(f"`{file}` must have row groups of at most {LARGEST_GROUP:,} bytes.")


def _warn_without_checksums(file: Place) -> None:
    folder = file.parent if isinstance(file, Path) else str(file).rpartition("/")[0]
    warnings.warn(f"The records in `{folder}` {WITHOUT_CHECKSUMS}", TrustRLWarning, stacklevel=5)


def _checked_region(file: Place, schema: Any, table: str) -> dict[str, Any] | None:
    """Checks a file's schema and returns the region's settings from its metadata."""
    metadata = schema.metadata or {}
    version = _checked_version(file, metadata.get(VERSION_KEY))
    got = metadata.get(TABLE_KEY, b"tokens").decode()
    if got != table:
        raise RecordError(f"`{file}` must be a file of the {table} table, got one of the {shortened(got)} table.")
    expected = _todays_schema(table)
    if not schema.equals(expected):
        names = set(schema.names)
        for name in (column.name for column in TABLES[table] if column.since <= version):
            wanted = expected.field(name).type
            if name not in names or schema.field(name).type != wanted:
                got = schema.field(name).type if name in names else "no such column"
                raise RecordError(f"`{file}` must have a column {name} of type {wanted}, got {shortened(got)}.")
    if table != "tokens":
        return None
    try:
        region = parsed_json(metadata.get(REGION_KEY, b""))
    except ValueError as error:
        raise RecordError(f"`{file}` must contain its region's settings as JSON, got: {error}.") from None
    if not isinstance(region, dict) and (region is not None or version < _FIRST_WITHOUT_REGION):
        raise RecordError(
            f"`{file}` must contain its region's settings as a JSON object, got {shortened(repr(region))}."
        )
    return region


def _checked_version(file: Place, raw: bytes | None) -> int:
    if raw is None or not raw.isdigit() or len(raw) > 9:
        got = "a Parquet file without a schema version" if raw is None else f"schema version {shortened(repr(raw))}"
        raise RecordError(f"`{file}` must be written by trustrl.recording, got {got}.")
    if int(raw) > VERSION:
        raise RecordError(
            f"`{file}` must have schema version {VERSION} or lower, got {int(raw)}. Install a newer trustrl."
        )
    return int(raw)

"""Merges the part files of many steps into one, so that a long run has few files. No torch.

The merged file appears when it is complete and on the disk; only then are the files that it replaces deleted. After a
kill in between, readers take the merged file, and the next compaction deletes the rest.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError, RecordError
from trustrl.files import parsed_json, sync
from trustrl.optional_imports import need
from trustrl.recording import storage
from trustrl.recording.part_names import PartName
from trustrl.recording.record_files import RECORDS, SEQUENCES, TEXTS, opened
from trustrl.recording.schema import (
    PARTS_KEY,
    REGION_KEY,
    STEP_KEY,
    TABLES,
    VERSION,
    VERSION_KEY,
    WRITER_KEY,
    arrow_schema,
    metadata,
    writing,
)  # fmt: skip
from trustrl.recording.storage import Place, Remote, WholeFile
from trustrl.recording.writers import Claims, listed

BLOCKS = (16, 128, 1024, 8192)
"""Steps in a merged file. Files of each size are merged again into files of the next, so that a rank has at
most seven of a size but the last. In the background, each row is written again once for each size."""

LARGEST = 256 * 2**20
"""Bytes of the files that are merged into one. Where steps are large, files are few for their size."""

TABLE_FOLDERS = {"texts": TEXTS, "sequences": SEQUENCES, "tokens": ""}
"""Folder of each table, in the order of deletion: no sequence ever names a text that is gone."""

ROW_GROUPS = {"texts": (2048, 2**20), "sequences": (2048, 2**20), "tokens": (65_536, 16 * 2**20)}
"""Rows and bytes of a full row group. Those of sequences are small: a reader goes through all ranks side by side."""


class _Unlike(Exception):
    """Part files that cannot share a file."""


def compact_rank(
    folder: Place, rank: int, *, before: int, after: int = 0, claims: Claims, check: Callable[[], None] = lambda: None
) -> int:
    """Merges the files of a rank in blocks of steps, the largest first. Returns the number of files deleted.

    Steps that a dump has in full keep their own files, because the dump replaces them by name.

    Args:
        folder: The folder of the record.
        rank: The rank.
        before: Merges blocks that end before this step.
        after: Leaves out blocks that end before this step: what could not be merged once is not tried again.
        claims: The claims of the record.
        check: Raises an error if another process has claimed the rank. Called before anything is deleted.

    Raises:
        OSError: If a file cannot be written.
        RecordError: If a file is damaged, or `check` raises it.
    """
    alone = _dumped(folder, rank)
    deleted = 0
    for table, inside in TABLE_FOLDERS.items():
        where = folder / inside
        deleted += _delete_covered(where, rank, table, claims, check)
        for size in reversed(BLOCKS):
            files = listed(where, rank)
            visible = [part for part in claims.sift(files).visible if part.first not in alone]
            for parts in _blocks(visible, size, range(after + 1, before + 1), alone):
                target = PartName(parts[0].first, parts[-1].last, rank, max(part.attempt for part in parts))
                fits = sum(storage.size_of(files[part]) for part in parts) <= LARGEST
                if fits and merged(where, parts, target, table):
                    check()
                    for part in parts:
                        storage.remove(files[part])
                    deleted += len(parts)
    return deleted


def _blocks(parts: Sequence[PartName], size: int, within: range, alone: set[int]) -> Iterator[list[PartName]]:
    """Yields the files of each block that ends within a range, without a gap of a step that stays alone."""

    def place(part: PartName) -> tuple[int, int]:
        return part.first // size, sum(step < part.first for step in alone)

    for (block, _), run in groupby(parts, place):
        chosen = list(run)
        ends = (block + 1) * size
        if ends in within and len(chosen) > 1 and chosen[-1].last < ends:
            yield chosen


def _dumped(folder: Place, rank: int) -> set[int]:
    """Returns the steps of a rank that are in dumps."""
    return {part.first for dump in storage.entries(folder, "dump-*") for part in listed(dump, rank)}


def _delete_covered(where: Place, rank: int, table: str, claims: Claims, check: Callable[[], None]) -> int:
    """Deletes files that a killed process merged and did not delete, by what the merged file says itself."""
    files = listed(where, rank)
    sifted = claims.sift(files)
    deleted = 0
    for cover in sifted.visible if sifted.covered else ():
        covered = [part for part in sifted.covered if cover.covers(part)]
        if covered:
            with opened(files[cover], table) as (parquet, _):
                steps = {entry["step"] for entry in steps_of(parquet, cover)}
            check()
            for part in covered:
                if part.is_merged or part.first in steps:
                    storage.remove(files[part])
                    deleted += 1
    return deleted


def merged(where: Place, parts: Sequence[PartName], target: PartName, table: str, *, until: int | None = None) -> bool:
    """Writes one file with the rows of several, in order. Returns False if they cannot share one.

    Files share one if the same version of trustrl wrote them, under the same region, with the same columns.

    Args:
        where: The folder of the table.
        parts: Files in it, in order of steps.
        target: Name of the file to write.
        table: Name of the table.
        until: Leaves out this step and later ones. None takes all.

    Raises:
        OSError: If the file cannot be written.
        RecordError: If a file is damaged.
    """
    whole = WholeFile(where / str(target))
    try:
        with ExitStack() as stack:
            rows = _Rows(table, whole, stack)
            for part in parts:
                with opened(where / str(part), table) as (parquet, _):
                    rows.add(parquet, part, until)
            rows.close(target)
        whole.seal()
        if isinstance(whole.target, Path):
            sync(whole.target)
        whole.publish()
        if isinstance(where, Path):
            sync(where)
    except _Unlike:
        whole.abandon()
        return False
    except BaseException:
        whole.abandon()
        raise
    return True


class _Rows:
    """Rows of several part files on their way into one. Memory holds a row group."""

    def __init__(self, table: str, whole: WholeFile, stack: ExitStack) -> None:
        self._table, self._whole, self._stack = table, whole, stack
        self._file: Any = None
        self._region: bytes | None = None
        self._filled: set[str] | None = None
        self._waiting: list[Any] = []
        self._parts: list[dict[str, int]] = []
        self._schema: Any = None

    def add(self, parquet: Any, part: PartName, until: int | None) -> None:
        """Adds the rows of a file."""
        own = parquet.schema_arrow.metadata
        names = [column.name for column in TABLES[self._table]]
        if own.get(VERSION_KEY) != str(VERSION).encode() or parquet.schema_arrow.names != names:
            raise _Unlike
        region = own.get(REGION_KEY)
        if self._file is None:
            self._region = region
            kept = {key: own[key] for key in (REGION_KEY, WRITER_KEY) if key in own}
            self._schema = arrow_schema(metadata(self._table) | kept, self._table)
            pq = need("pyarrow.parquet", extra="records")
            self._file = pq.ParquetWriter(self._whole.target, self._schema, **writing(self._table))
            self._stack.callback(self._file.close)
        if region != self._region:
            raise _Unlike
        steps = [entry for entry in steps_of(parquet, part) if until is None or entry["step"] < until]
        if self._table == "tokens" and any("tokens_in_loss" not in entry for entry in steps):
            raise _Unlike
        self._parts += steps
        left = sum(entry["rows"] for entry in steps)
        for batch in parquet.iter_batches(batch_size=ROW_GROUPS[self._table][0] // 8, use_threads=False):
            batch = batch.slice(0, left)
            left -= len(batch)
            if len(batch):
                self._take(batch)

    def _take(self, batch: Any) -> None:
        if self._table == "tokens":
            filled = {name for name in batch.schema.names if batch.column(name).null_count < len(batch)}
            self._filled = filled if self._filled is None else self._filled
            if filled != self._filled:
                raise _Unlike
        self._waiting.append(batch)
        rows, size = ROW_GROUPS[self._table]
        if sum(map(len, self._waiting)) >= rows or sum(waiting.nbytes for waiting in self._waiting) >= size:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            pa = need("pyarrow", extra="records")
            # The parts have their own metadata, which the table must not.
            batches = [pa.RecordBatch.from_arrays(batch.columns, schema=self._schema) for batch in self._waiting]
            self._file.write_table(
                pa.Table.from_batches(batches, self._schema), row_group_size=ROW_GROUPS[self._table][0]
            )
            self._waiting = []

    def close(self, target: PartName) -> None:
        """Writes what is left, and the metadata."""
        self._write()
        counts: dict[bytes, Any] = {PARTS_KEY: self._parts}
        if self._table == "tokens":
            names = ("tokens_in_loss", "rows")
            counts[STEP_KEY] = {name: sum(entry[name] for entry in self._parts) for name in names}
        self._file.add_key_value_metadata({key.decode(): json.dumps(value) for key, value in counts.items()})


def steps_of(parquet: Any, part: PartName) -> list[dict[str, int]]:
    """Returns the steps in a part file in the order of its rows, each with its number of rows.

    For tokens also the number of tokens in the loss. A file of one step has one entry.

    Raises:
        RecordError: If the metadata lacks them.
    """
    own = parquet.metadata.metadata or {}
    rows = parquet.metadata.num_rows
    try:
        if PARTS_KEY in own:
            entries = parsed_json(own[PARTS_KEY])
        else:
            more = parsed_json(own[STEP_KEY]) if STEP_KEY in own else {}
            entries = [{**more, "step": part.first, "attempt": part.attempt, "rows": rows}]
        fits = (
            all(isinstance(entry["step"], int) and part.first <= entry["step"] <= part.last for entry in entries)
            and sum(entry["rows"] for entry in entries) == rows
            and all(entry["rows"] >= 0 for entry in entries)
        )
    except (ValueError, KeyError, TypeError):
        fits, entries = False, []
    if not fits:
        raise RecordError(f"`{part}` must have its steps, and their rows, in the metadata `{PARTS_KEY.decode()}`.")
    return entries


def compact_record(address: str | PathLike[str] | Remote) -> tuple[int, int]:
    """Merges the files of all ranks of a record that nobody writes to. Returns the number of files before and after.

    Raises:
        ConfigError: If there is no folder at the address.
        RecordError: If a file is damaged, or the store cannot be read or written to.
    """
    where = storage.place(address)
    try:
        if not storage.is_folder(where):
            raise ConfigError(f"ADDRESS must be an existing folder, got `{where}`.")
        inside = storage.inside(where, RECORDS)
        folder = inside if storage.is_folder(inside) else where
        claims, before = Claims.of(folder), _num_files(folder)
        for rank in sorted({part.rank for part in listed(folder)}):
            steps = [part.last for part in listed(folder, rank)]
            ends = -(-(max(steps, default=0) + 1) // BLOCKS[-1]) * BLOCKS[-1]
            compact_rank(folder, rank, before=ends, claims=claims)
        return before, _num_files(folder)
    except OSError as error:
        raise RecordError(f"Cannot compact `{where}`: {str(error).rstrip('.')}.") from error


def _num_files(folder: Place) -> int:
    return sum(len(listed(folder / inside)) for inside in TABLE_FOLDERS.values())

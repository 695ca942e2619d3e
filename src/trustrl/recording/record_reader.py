"""Readers for record files: `read` loads them at once, `stream` yields pieces of bounded size."""

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from trustrl.errors import RecordError, TrustRLError
from trustrl.files import shortened
from trustrl.optional_imports import need
from trustrl.recording.record_files import by_step, check_rows, opened, part_files, read_again, read_table
from trustrl.recording.schema import COLUMNS
from trustrl.recording.storage import Place, Remote, place
from trustrl.regions.loading import config_from_dict, config_to_dict

ROWS = 65_536
"""Rows in a piece. Only a longer sequence makes a larger piece."""

_NAMES = ("step", "update", "sequence")
"""Columns that identify one sequence at one update."""

_FLAT = tuple(column.name for column in COLUMNS if not column.kind.startswith("list"))

_EMPTY = {torch.float32: float("nan"), torch.int16: -1, torch.int32: -1, torch.int64: -1, torch.bool: False}


class Records(Mapping[str, Tensor]):
    """Columns by name, one entry per token and update. Columns that are null for every token are absent.

    A top-K column is (N, K), padded with −1 and NaN if a token has fewer ids.
    """

    def __init__(self, table: Any, region: dict[str, Any] | None) -> None:
        self.table = table
        """The pyarrow table, for `.to_pandas()`, DuckDB or Polars."""

        self.region = region
        """The region's settings, for `trustrl.config_from_dict`. None if no region decided."""

        self._names = [name for name in table.column_names if table[name].null_count < len(table)]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return tensor_of(self.table[name].combine_chunks()).clone()  # the caller may write to it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read(path: str | PathLike[str] | Remote) -> Records:
    """Reads a record file, or all part files of a directory by step and rank. Skips dumps, which are subdirectories.

    Args:
        path: A local path, or an address such as `s3://bucket/run/records`.

    Raises:
        RecordError: If the path has no records, trustrl did not write a file, a newer trustrl wrote it, or the files
            are of different regions.
        MissingPackageError: If pyarrow is not installed.
    """
    return read_again(lambda: _records(path))


def _records(path: str | PathLike[str] | Remote) -> Records:
    pa = need("pyarrow", extra="records")
    files = part_files(path)
    tables, regions = [], []
    for file in files:
        table, region = read_table(file)
        tables.append(table)
        regions.append(_with_todays_settings(region))
    for file, region in zip(files, regions, strict=True):
        if region != regions[0]:
            first, other = (shortened(settings, longest=1000) for settings in (regions[0], region))
            raise RecordError(
                f"All files must be of one region, got {first} in `{files[0].name}` and {other} in `{file.name}`. Read "
                "them one by one."
            )
    return Records(by_step(pa.concat_tables(tables), files), regions[0])


def _with_todays_settings(region: dict[str, Any] | None) -> dict[str, Any] | None:
    """Adds settings that the region has gained since the file was written, at their defaults."""
    try:
        return None if region is None else config_to_dict(config_from_dict(region))
    except (TrustRLError, TypeError):  # not registered here
        return region


def tensor_of(array: Any) -> Tensor:
    """Converts an arrow array to a tensor. Nulls, and the padding of lists, become −1, NaN or False."""
    pa = need("pyarrow", extra="records")
    if pa.types.is_list(array.type):
        lengths = tensor_of(array.value_lengths().fill_null(0)).long()
        values = tensor_of(array.flatten())
        out = values.new_full((len(array), int(lengths.max()) if len(array) else 0), _EMPTY[values.dtype])
        out[torch.arange(out.shape[1]) < lengths.unsqueeze(1)] = values
        return out
    if pa.types.is_boolean(array.type):
        return tensor_of(array.cast(pa.uint8())).bool()
    dtype = {
        "float": torch.float32, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8,
    }[str(array.type)]  # fmt: skip
    if array.null_count:
        array = array.fill_null(_EMPTY[dtype])
    return torch.from_dlpack(array) if len(array) else torch.empty(0, dtype=dtype)  # shares arrow's memory


class Piece(NamedTuple):
    """Consecutive whole sequences, each at one update."""

    columns: dict[str, Tensor]
    """By name, one entry per token. Columns that the file lacks are absent."""

    run: Int[Tensor, " n"]
    """Index of each token's sequence in this piece, from 0. A sequence at another update has another index."""

    region: dict[str, Any] | None
    """Settings of the region whose decisions were recorded, for `trustrl.config_from_dict`. None without a region."""

    def __len__(self) -> int:
        return len(self.run)


def stream(
    files: str | PathLike[str] | Remote | Sequence[Place], *, columns: Sequence[str] = _FLAT, rows: int = ROWS
) -> Iterator[Piece]:
    """Yields the tokens of part files in order. Small files share a piece.

    Needs memory for about two pieces of these columns and one row group. If the tokens of a sequence are not
    contiguous, as with packed micro-batches of some trainers, the whole file is read and sorted.

    Args:
        files: One part file, by its path or address, or several.
        columns: The columns to read, without the top-K.
        rows: The number of rows per piece.

    Raises:
        RecordError: If trustrl did not write a file, or it is broken.
        MissingPackageError: If pyarrow is not installed.
    """
    wanted = [name for name in _FLAT if name in {*columns, *_NAMES}]
    waiting: list[dict[str, Tensor]] = []
    whose: dict[str, Any] | None = None
    for file in [place(files)] if isinstance(files, (str, PathLike, Remote)) else files:
        for part, region in _one_file(file, wanted, rows):
            alike = not waiting or (region == whose and part.keys() == waiting[0].keys())
            if not alike or sum(map(_length, waiting)) + _length(part) > rows:
                yield from _piece(waiting, whose)
                waiting = []
            waiting.append(part)
            whose = region
    yield from _piece(waiting, whose)


def _piece(parts: list[dict[str, Tensor]], region: dict[str, Any] | None) -> Iterator[Piece]:
    runs, num = [], 0
    for part in parts:  # indexed file by file, because two runs with one seed have equal ids
        runs.append(_runs(part) + num)
        num = int(runs[-1][-1]) + 1
    if parts:
        yield Piece(_joined(parts), torch.cat(runs), region)


def _length(columns: dict[str, Tensor]) -> int:
    return len(columns["sequence"])


def _one_file(file: Place, names: list[str], rows: int) -> Iterator[tuple[dict[str, Tensor], dict[str, Any] | None]]:
    with opened(file) as (parquet, region):
        pieces = _batches(parquet, names, rows, file)
        if parquet.metadata.num_rows <= rows:  # one batch, which is checked as it is
            whole = next(pieces, None)
            pieces = iter([] if whole is None else [whole if _contiguous(iter([whole])) else _sorted(whole)])
        elif not _contiguous(_batches(parquet, list(_NAMES), rows, file)):
            pieces = iter([_sorted(_joined(list(pieces)))])
        for part in _ending_with_a_sequence(pieces):
            if _length(part):
                yield part, region


def _batches(parquet: Any, names: list[str], rows: int, file: Place) -> Iterator[dict[str, Tensor]]:
    present: list[str] | None = None
    known = set(parquet.schema_arrow.names)
    names = [name for name in names if name in known]  # older files lack some
    first = 0
    for batch in parquet.iter_batches(batch_size=rows, columns=names, use_threads=False):
        check_rows(batch, file, "tokens", first)
        first += len(batch)
        filled = [name for name in names if batch.column(name).null_count < len(batch)]
        if present is None:
            present = filled
        elif not set(filled) <= set(present):
            partial = sorted(set(filled) - set(present))
            raise RecordError(
                f"`{file}` must have each column either in all rows or in none, got {partial} in some rows only."
            )
        yield {name: tensor_of(batch.column(name)) for name in present}


def _starts(columns: dict[str, Tensor]) -> Bool[Tensor, " n"]:
    """Flags the first token of each run."""
    starts = torch.zeros(_length(columns), dtype=torch.bool)
    starts[:1] = True
    for name in _NAMES:
        starts[1:] |= columns[name][1:] != columns[name][:-1]
    return starts


def _runs(columns: dict[str, Tensor]) -> Int[Tensor, " n"]:
    return _starts(columns).cumsum(0) - 1


def _contiguous(batches: Iterator[dict[str, Tensor]]) -> bool:
    """Returns True if no sequence continues after another one has begun. Reads only the identifying columns."""
    begun = [_firsts(batch) for batch in batches]
    if not begun:
        return True
    together = _firsts(_joined(begun)) if len(begun) > 1 else begun[0]  # two batches may share a sequence
    return len(_firsts(_sorted(together))["sequence"]) == len(together["sequence"])


def _firsts(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the identifying columns at the first row of each run."""
    first = _starts(columns).nonzero().squeeze(1)
    return {name: columns[name].index_select(0, first) for name in _NAMES}


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]


def _sorted(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sorts by sequence within each update. Tokens of one sequence keep their order."""
    order = torch.arange(_length(columns))
    for name in reversed(_NAMES):
        order = order[columns[name][order].argsort(stable=True)]
    return {name: x[order] for name, x in columns.items()}


def _ending_with_a_sequence(pieces: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Moves each piece's last sequence to the next piece, so that no sequence is cut."""
    held: dict[str, Tensor] | None = None
    for piece in pieces:
        if held is not None:
            run = _runs(held)
            end = int(torch.searchsorted(run, run[-1]))
            if end:
                yield {name: x[:end] for name, x in held.items()}
            piece = _joined([{name: x[end:] for name, x in held.items()}, piece])
        held = piece
    if held is not None:
        yield held

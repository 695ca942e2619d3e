"""Records in pieces of bounded size, each made of whole sequences, for files that should not be in memory at once."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from trustrl.errors import RecordError
from trustrl.recording.parquet import opened
from trustrl.recording.reading import tensor_of
from trustrl.recording.schema import COLUMNS

ROWS = 65_536
"""Rows in a piece; more only where a sequence is longer."""

_NAMES = ("step", "update", "sequence")
"""What makes two rows tokens of one sequence at one update."""

_FLAT = tuple(column.name for column in COLUMNS if not column.kind.startswith("list"))


class Piece(NamedTuple):
    """Some whole sequences, each at one update, one after the other."""

    columns: dict[str, Tensor]
    """By name, one entry per token; columns that the file does not have are not there."""

    run: Int[Tensor, " n"]
    """Numbers the sequences of this piece from 0; the same sequence at another update is another one."""

    region: dict[str, Any]
    """Whose verdicts were recorded, as `trustrl.config_from_dict` reads it."""

    def __len__(self) -> int:
        return len(self.run)


def stream(files: str | Path | Sequence[Path], *, columns: Sequence[str] = _FLAT, rows: int = ROWS) -> Iterator[Piece]:
    """The tokens of part files in their order; small files come together in one piece.

    Memory: about two pieces of these columns, and one row group. Only where the tokens of a sequence do not stand side
    by side, which a trainer with packed micro-batches may have given, is a file read whole, and sorted.

    Args:
        files: one part file, or several.
        columns: which ones to read; not the top-K.
        rows: how many at a time.

    Raises:
        RecordError: a file is not one of ours, or broken.
        MissingPackageError: pyarrow is not installed.
    """
    wanted = [name for name in _FLAT if name in {*columns, *_NAMES}]
    waiting: list[dict[str, Tensor]] = []
    whose: dict[str, Any] = {}
    for file in [Path(files)] if isinstance(files, (str, Path)) else files:
        for part, region in _one_file(file, wanted, rows):
            alike = not waiting or (region == whose and part.keys() == waiting[0].keys())
            if not alike or sum(map(_length, waiting)) + _length(part) > rows:
                yield from _piece(waiting, whose)
                waiting = []
            waiting.append(part)
            whose = region
    yield from _piece(waiting, whose)


def _piece(parts: list[dict[str, Tensor]], region: dict[str, Any]) -> Iterator[Piece]:
    runs, num = [], 0
    for part in parts:  # numbered file by file: two runs of a seed give the same names
        runs.append(_runs(part) + num)
        num = int(runs[-1][-1]) + 1
    if parts:
        yield Piece(_joined(parts), torch.cat(runs), region)


def _length(columns: dict[str, Tensor]) -> int:
    return len(columns["sequence"])


def _one_file(file: Path, names: list[str], rows: int) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    with opened(file) as (parquet, region):
        pieces = _batches(parquet, names, rows, file)
        if not _side_by_side(parquet, rows):
            pieces = iter([_sorted(_joined(list(pieces)))])
        for part in _ending_with_a_sequence(pieces):
            if _length(part):
                yield part, region


def _batches(parquet: Any, names: list[str], rows: int, file: Path) -> Iterator[dict[str, Tensor]]:
    present: list[str] | None = None
    for batch in parquet.iter_batches(batch_size=rows, columns=names, use_threads=False):
        filled = [name for name in names if batch.column(name).null_count < len(batch)]
        if present is None:
            present = filled
        elif not set(filled) <= set(present):
            raise RecordError(
                f"`{file}` must have a column in all rows or in none, got {sorted(set(filled) - set(present))} in some."
            )
        yield {name: tensor_of(batch.column(name)) for name in present}


def _runs(columns: dict[str, Tensor]) -> Int[Tensor, " n"]:
    starts = torch.zeros(_length(columns), dtype=torch.bool)
    for name in _NAMES:
        starts[1:] |= columns[name][1:] != columns[name][:-1]
    return starts.cumsum(0)


def _side_by_side(parquet: Any, rows: int) -> bool:
    """Whether no sequence goes on after another one has begun; reads the names alone."""
    begun: list[dict[str, Tensor]] = []
    for batch in parquet.iter_batches(batch_size=rows, columns=list(_NAMES), use_threads=False):
        begun.append(_firsts({name: tensor_of(batch.column(name)) for name in _NAMES}))
    if not begun:
        return True
    together = _firsts(_joined(begun))  # once more: two batches may share a sequence
    return len(_firsts(_sorted(together))["sequence"]) == len(together["sequence"])


def _firsts(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first row of each run."""
    first = torch.ones(_length(columns), dtype=torch.bool)
    first[1:] = _runs(columns).diff() != 0
    return {name: x[first] for name, x in columns.items()}


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]


def _sorted(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """By sequence within update; tokens of one keep their order."""
    order = torch.arange(_length(columns))
    for name in reversed(_NAMES):
        order = order[columns[name][order].argsort(stable=True)]
    return {name: x[order] for name, x in columns.items()}


def _ending_with_a_sequence(pieces: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """What follows a piece's last border is held back until the rest of its sequence is there."""
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

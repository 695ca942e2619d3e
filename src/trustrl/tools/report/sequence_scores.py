"""Scores of the sequences in a run's token records, as a table: a long run has millions of sequences, and shows few."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trustrl.optional_imports import need
from trustrl.recording.storage import Place


class SequenceScore(NamedTuple):
    """Scores of a sequence at the update that masked most of it. A score is None if its columns are missing."""

    stopped: int
    changed: int
    """Number of reweighted tokens."""

    log_ratio: float | None
    """Largest |log π − log μ|."""

    gap: float | None
    """Largest |log π' − log μ|."""

    tokens: int
    advantage: float | None
    """Mean over the tokens."""

    step: int
    update: int
    file: Place


_SCORED = (
    ("stopped", "sum"), ("changed", "sum"), ("log_ratio", "max"), ("gap", "max"), ("stopped", "count"),
    ("advantage", "mean"), ("step", "min"),
)  # fmt: skip
"""Columns of tokens and how they are aggregated, in the order of the fields of a score."""


class SequenceScores(Mapping[int, SequenceScore]):
    """Scores by sequence, in the order in which the sequences were read."""

    def __init__(self, files: Sequence[Place]) -> None:
        self._files = files
        self._grouped: list[Any] = []
        self._table: Any = None

    def add(self, rows: Any) -> None:
        """Adds tokens with the columns of `_SCORED`, `sequence`, `update`, and `file` as an index into the files."""
        grouped = rows.group_by(["sequence", "update", "file"]).aggregate(list(_SCORED))
        names = ["sequence", *(f"{name}_{how}" for name, how in _SCORED), "update", "file"]
        self._grouped.append(grouped.select(names).rename_columns(["sequence", *SequenceScore._fields]))

    @property
    def _rows(self) -> Any:
        """One row per sequence, with `sequence` and the fields of its score; `file` is an index. None without rows."""
        if self._grouped:
            self._table, self._grouped = _worst_updates(self._grouped), []
        return self._table

    def __getitem__(self, sequence: int) -> SequenceScore:
        return self.of([sequence])[sequence]

    def __iter__(self) -> Iterator[int]:
        return iter(() if self._rows is None else self._rows["sequence"].to_pylist())

    def __len__(self) -> int:
        return 0 if self._rows is None else len(self._rows)

    def of(self, sequences: Iterable[int]) -> dict[int, SequenceScore]:
        """Returns the scores of those sequences that have any."""
        return self._taken(self._known(sequences)) if len(self) else {}

    def others(self, sequences: Iterable[int]) -> "SequenceScores":
        """Returns the scores of all other sequences."""
        rest = SequenceScores(self._files)
        if len(self):
            pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
            known = pc.is_in(self._rows["sequence"], value_set=pa.array(sequences, pa.int64()))
            rest._table = self._rows.filter(pc.invert(known))
        return rest

    def leading(self, num: int, steps: Iterable[float], places: Iterable[int]) -> dict[int, tuple[int, SequenceScore]]:
        """Returns the sequences that lead by any measure with their scores, by their places in the order of all.

        Args:
            num: The number of sequences for each measure.
            steps: Steps; the distance to each is a measure.
            places: Places of sequences that are returned too.
        """
        if not len(self):
            return {}
        pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
        rows = self._rows.append_column("place", pa.array(range(len(self)), pa.int64()))
        chosen = set(places)
        for names in (["stopped", "changed"], ["log_ratio"], ["gap"], ["tokens"]):
            valid = rows.filter(pc.is_valid(rows[names[0]]))
            keys = [*((name, "descending") for name in names), ("place", "ascending")]
            chosen |= _first(valid, num, keys)
        for step in steps:
            distance = pc.abs(pc.subtract(pc.cast(rows["step"], pa.float64()), step))
            keys = [("distance", "ascending"), ("place", "ascending")]
            chosen |= _first(rows.append_column("distance", distance), num, keys)
        ordered = sorted(chosen)
        return dict(zip(ordered, self._taken(pa.array(ordered, pa.int64())).items(), strict=True))

    def _known(self, sequences: Iterable[int]) -> Any:
        pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
        return pc.index_in(pa.array(sequences, pa.int64()), value_set=self._rows["sequence"]).drop_null()

    def _taken(self, places: Any) -> dict[int, SequenceScore]:
        rows = self._rows.take(places)
        sequences, *fields, files = (rows[name].to_pylist() for name in ("sequence", *SequenceScore._fields))
        scores = zip(*fields, map(self._files.__getitem__, files), strict=True)
        return dict(zip(sequences, map(SequenceScore._make, scores), strict=True))


def _first(rows: Any, num: int, keys: list[tuple[str, str]]) -> set[int]:
    """Returns the places of the first rows in an order."""
    pc = need("pyarrow.compute", extra="records")
    return set(rows["place"].take(pc.select_k_unstable(rows, num, keys)).to_pylist())


def _worst_updates(grouped: Sequence[Any]) -> Any:
    """Returns the row of each sequence that masked most, then reweighted most, then moved farthest."""
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    table = pa.concat_tables(grouped).combine_chunks()
    order = pa.array(range(len(table)), pa.int64())
    table = table.append_column("order", order).append_column("moved", pc.fill_null(table["log_ratio"], 0.0))
    keys = [(name, "descending") for name in ("stopped", "changed", "moved")]
    table = table.sort_by([*keys, ("order", "ascending")]).append_column("place", order)
    worst = table.select(["sequence", "order", "place"]).group_by("sequence")
    worst = worst.aggregate([("place", "min"), ("order", "min")]).sort_by("order_min")
    return table.take(worst["place_min"]).select(["sequence", *SequenceScore._fields])

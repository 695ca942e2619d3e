"""The sequence and text tables of a record: rewards, groups and texts of the sampled sequences. No torch."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any

from trustrl.errors import RecordError
from trustrl.optional_imports import need
from trustrl.recording import storage
from trustrl.recording.part_names import PartName
from trustrl.recording.record_files import (
    SEQUENCES,
    TEXTS,
    by_step,
    in_todays_schema,
    opened,
    parts_in,
    read_again,
    whole,
)
from trustrl.recording.schema import TABLES, arrow_schema, metadata, writing
from trustrl.recording.storage import Place, Remote, WholeFile
from trustrl.recording.writers import Claim


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRows:
    """Sequences of a rollout, one list entry each. A field, or a single entry, is None if it is unknown.

    Example:
        >>> SequenceRows(sequence=[7, 8], reward=[1.0, 0.0], rewards=[{"correct": 1.0}, {"correct": 0.0}]).reward
        [1.0, 0.0]
        >>> SequenceRows(sequence=[7, 8], reward=[1.0])
        Traceback (most recent call last):
        ...
        trustrl.errors.RecordError: SequenceRows.reward must have one entry per sequence, got 1 for 2 sequences.
    """

    sequence: Sequence[int]
    """Ids, as passed to `Recorder.add`."""

    group: Sequence[int | None] | None = None
    """Equal for completions of one prompt in one batch."""

    task_id: Sequence[str | None] | None = None
    """Name of the task or data set that the prompt comes from."""

    prompt_tokens: Sequence[int | None] | None = None
    completion_tokens: Sequence[int | None] | None = None
    reward: Sequence[float | None] | None = None
    """Total reward."""

    rewards: Sequence[Mapping[str, float | None] | None] | None = None
    """Reward by component."""

    advantage: Sequence[float | None] | None = None
    stop_reason: Sequence[str | None] | None = None
    """Reason why sampling ended, as the engine names it."""

    replica: Sequence[str | None] | None = None
    """Address or rank of the sampler's replica that drew the sequence."""

    prompt: Sequence[str | None] | None = None
    completion: Sequence[str | None] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            column = getattr(self, field.name)
            if column is not None and len(column) != len(self.sequence):
                raise RecordError(
                    f"SequenceRows.{field.name} must have one entry per sequence, got {len(column)} for "
                    f"{len(self.sequence)} sequences."
                )

    def rows(self, keep: Sequence[bool]) -> Iterator[dict[str, Any]]:
        """Yields the sequences to keep, each as a dictionary of its known values."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        for index, kept in enumerate(keep):
            if kept:
                yield {name: values[index] for name, values in columns.items() if values is not None}


def write_sequences(
    folder: Place,
    rows: Collection[dict[str, Any]],
    *,
    step: int,
    rank: int,
    text: bool,
    claim: Claim | None = None,
) -> None:
    """Writes the sequences of one step on one rank, and their texts if wanted.

    The texts come first, so that a row of the sequence table never names a missing file.

    Args:
        folder: The folder of the record.
        rows: Sequences, as `SequenceRows.rows` yields them.
        step: The training step.
        rank: The rank of this process.
        text: False leaves out prompts and completions.
        claim: The claim of the process on the rank, which the files name. None writes as the first one, unnamed.
    """
    name = str(PartName(step, step, rank, 1 if claim is None else claim.attempt))
    writer = None if claim is None else claim.metadata
    texts = [row for row in rows if row.get("prompt") is not None or row.get("completion") is not None] if text else []
    if texts:
        _write(folder / TEXTS, name, metadata("texts", writer), "texts", texts)
    held = {row["sequence"] for row in texts}
    more = [row | {"step": step, "rank": rank, "text": name if row["sequence"] in held else None} for row in rows]
    _write(folder / SEQUENCES, name, metadata("sequences", writer), "sequences", more)


def _write(folder: Place, name: str, about: dict[bytes, bytes], table: str, rows: Collection[dict[str, Any]]) -> None:
    pa, pq = need("pyarrow", extra="records"), need("pyarrow.parquet", extra="records")
    schema = arrow_schema(about, table)
    arrays = [_array(pa, field, [_value(row.get(field.name)) for row in rows]) for field in schema]
    storage.make_folder(folder)
    whole = WholeFile(folder / name)
    try:
        pq.write_table(pa.Table.from_arrays(arrays, schema=schema), whole.target, **writing(table))
        whole.seal()
        whole.publish()
    except BaseException:
        whole.abandon()
        raise


def _array(pa: Any, field: Any, values: list[Any]) -> Any:
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        got = str(error).rstrip(".")
        raise RecordError(f"SequenceRows.{field.name} must contain {field.type} or None, got: {got}.") from error


def _value(raw: Any) -> Any:
    """Returns a value as pyarrow takes it: a map as pairs, and text that UTF-8 can represent."""
    if isinstance(raw, Mapping):
        return [(_value(key), value) for key, value in raw.items()]
    if isinstance(raw, str):
        return raw.encode("utf-8", "replace").decode()  # a tokenizer may return lone surrogates
    return raw


def read_sequences(path: str | PathLike[str] | Remote, *, newest: int | None = None) -> Any:
    """Returns the sequences of a record folder as a `pyarrow.Table`, by step and rank. Empty if it has none.

    Args:
        path: The folder, or its address.
        newest: The number of files to read, those of the last steps. None reads all.

    Raises:
        RecordError: If a file cannot be read, or a newer trustrl wrote it.
        MissingPackageError: If pyarrow is not installed.
    """
    return read_again(lambda: _read(storage.place(path), SEQUENCES, "sequences", newest))


def read_texts(path: str | PathLike[str] | Remote) -> Any:
    """Returns prompts and completions of a record folder as a `pyarrow.Table`. Empty if it has none.

    Raises:
        RecordError: If a file cannot be read, or a newer trustrl wrote it.
        MissingPackageError: If pyarrow is not installed.
    """
    return read_again(lambda: _read(storage.place(path), TEXTS, "texts"))


def _read(folder: Place, inside: str, table: str, newest: int | None = None) -> Any:
    pa, names = need("pyarrow", extra="records"), [column.name for column in TABLES[table]]
    try:
        files = parts_in(folder, inside)[-newest if newest else None :]
    except OSError as error:
        raise RecordError(f"Cannot read `{folder}`: {str(error).rstrip('.')}.") from error
    tables = []
    for file in files:
        with opened(file, table) as (parquet, _):
            tables.append(in_todays_schema(whole(parquet, file, table), table, names))
    if not tables:
        return arrow_schema(table=table).empty_table()
    return by_step(pa.concat_tables(tables), files)

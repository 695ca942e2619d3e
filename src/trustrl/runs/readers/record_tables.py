"""Completions and settings from the sequence and text tables and run.json of token records."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import merge
from typing import Any

from trustrl.errors import RecordError
from trustrl.optional_imports import need
from trustrl.recording import storage
from trustrl.recording.part_names import PartName
from trustrl.recording.record_files import SEQUENCES, TEXTS, FileGone, in_todays_schema, opened, parts_in, whole
from trustrl.recording.run_file import read_run
from trustrl.recording.schema import arrow_schema
from trustrl.recording.storage import Place
from trustrl.runs.run import Completion

_COLUMNS = (
    "sequence", "step", "group", "task_id", "completion_tokens", "reward", "rewards", "advantage", "stop_reason",
    "text",
)  # fmt: skip

_TEXT_COLUMNS = ("sequence", "prompt", "completion")

_ROWS = 64
"""Sequences that are Python objects at a time, for each rank. Texts may be long."""

_ATTEMPTS = 5
"""Readings of a record that changes meanwhile."""

_ENGINE = ("loss", "steps_planned", "updates_per_batch", "completions_per_prompt", "learning_rate", "seed")


def has_sequences(folder: str) -> bool:
    """Returns True if the records in a folder contain a sequence table."""
    return bool(parts_in(storage.place(folder), SEQUENCES))


def completions(folder: str) -> Iterator[Completion]:
    """Yields the completions of a record, each once, with the step of the metrics row it was first trained in.

    TRL records count the updates before a step, so the step is one more. verl records count batches.

    Raises:
        RecordError: If a file cannot be read.
    """
    place, known = storage.place(folder), set[int]()
    first = 0 if settings(folder).get("engine") == "verl" else 1
    for attempt in range(_ATTEMPTS):
        try:
            for row in _all_rows(place):
                if row["sequence"] not in known:  # otherwise a later step on the same sequence
                    known.add(row["sequence"])
                    yield _completion(row, first)
        except FileGone:  # the run still records, and has merged files since they were listed
            if attempt + 1 == _ATTEMPTS:
                raise
        else:
            return


def _all_rows(place: Place) -> Iterator[dict[str, Any]]:
    """Returns the sequences of all ranks by step. A merged file has many steps of one rank, in order."""
    texts = TextFiles(place)
    ranks: dict[int, list[Place]] = defaultdict(list)
    for file in parts_in(place, SEQUENCES):
        part = PartName.of(file.name)
        assert part is not None
        ranks[part.rank].append(file)
    return merge(*(_rows(files, texts) for files in ranks.values()), key=lambda row: row["step"])


def _rows(files: list[Place], texts: "TextFiles") -> Iterator[dict[str, Any]]:
    """Yields the sequences of one rank, each with its prompt and completion. Memory holds few of them at a time."""
    reading: dict[Place, _TextRows] = {}
    for file in files:
        for table in _row_groups(file, "sequences", _COLUMNS):
            for batch in table.to_batches(max_chunksize=_ROWS):
                named = texts.named(batch.column("text").unique().to_pylist(), file)
                reading = {place: reading.get(place) or _TextRows(place) for place in named}
                yield from _with_texts(batch, [(reading[place], names) for place, names in named.items()])


def _row_groups(file: Place, table: str, columns: tuple[str, ...]) -> Iterator[Any]:
    """Yields the row groups of a file. It is open only while one is read: a run may have more ranks than open files."""
    group, number = 0, 1
    while group < number:
        with opened(file, table) as (parquet, _):
            number = parquet.num_row_groups
            rows = whole(parquet, file, table, groups=[group] if number else None)
        yield in_todays_schema(rows.select([name for name in columns if name in rows.column_names]), table, columns)
        group += 1


def _with_texts(batch: Any, files: "list[tuple[_TextRows, list[str]]]") -> list[dict[str, Any]]:
    """Returns sequences with `prompt` and `completion`, None where no text is recorded.

    Args:
        batch: The sequences.
        files: The files that have their texts, each with its names in the column `text`.
    """
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    table = pa.Table.from_batches([batch])
    held = []
    for rows, names in files:
        wanted = table["sequence"].filter(pc.is_in(table["text"], value_set=pa.array(names, pa.string())))
        held.append(rows.of(wanted))
    joined = pa.concat_tables(held) if held else arrow_schema(table="texts").empty_table()
    places = pc.index_in(table["sequence"], value_set=joined["sequence"])
    for name in ("prompt", "completion"):
        table = table.append_column(name, joined[name].take(places))
    return table.to_pylist()


class _TextRows:
    """Texts of one file. They are in the order of the sequences, so that few row groups are held at a time."""

    def __init__(self, file: Place) -> None:
        self._file = file
        self._groups = _row_groups(file, "texts", _TEXT_COLUMNS)
        self._held = next(self._groups)
        self._dropped = 0
        """Rows before those that are held."""

        self._in_order = True

    def of(self, sequences: Any) -> Any:
        """Returns rows among which are those of the sequences, as far as the file has them."""
        pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
        rows, places = self._held, self._places(sequences)
        while places.null_count and (group := next(self._groups, None)) is not None:
            self._held = rows = pa.concat_tables([rows, group])
            places = self._places(sequences)
        if places.null_count and self._dropped:
            self._held = rows = pa.concat_tables(_row_groups(self._file, "texts", _TEXT_COLUMNS))
            self._dropped, self._in_order = 0, False
        elif not places.null_count and self._in_order and len(places):
            num = pc.max(places).as_py() + 1
            self._held, self._dropped = rows.slice(num), self._dropped + num
        return rows

    def _places(self, sequences: Any) -> Any:
        pc = need("pyarrow.compute", extra="records")
        return pc.index_in(sequences, value_set=self._held["sequence"])


class TextFiles:
    """Text files of a record by the names in the sequence table, which stay as they were when files are merged."""

    def __init__(self, folder: Place) -> None:
        self._ranks: dict[int, list[tuple[PartName, Place]]] = defaultdict(list)
        self._folder = folder
        for file in parts_in(folder, TEXTS):
            part = PartName.of(file.name)
            assert part is not None
            self._ranks[part.rank].append((part, file))

    def named(self, names: Iterable[str | None], sequences: Place) -> dict[Place, list[str]]:
        """Returns the files that have the texts, those of the rank that include the step, each with its names.

        Raises:
            RecordError: If a name does not belong to a part file.
        """
        files: dict[Place, list[str]] = {}
        for name in names:
            if name is not None:
                files.setdefault(self._file(name, sequences), []).append(name)
        return files

    def _file(self, name: str, sequences: Place) -> Place:
        part = PartName.of(name)
        if part is None:
            raise RecordError(f"`{sequences}` must name files in {TEXTS}/ in the column text, got {name!r:.80}.")
        own = self._ranks[part.rank]
        index = bisect_right(own, part.first, key=lambda entry: entry[0].first) - 1
        if index >= 0 and part.last <= own[index][0].last:
            return own[index][1]
        return storage.inside(storage.inside(self._folder, TEXTS), name)


def _completion(row: dict[str, Any], first: int) -> Completion:
    group = None if row["group"] is None else f"{row['step']} {row['group']}"
    return Completion(
        step=row["step"] + first, prompt=row["prompt"], text=row["completion"], group=group,
        reward=_finite(row["reward"]),
        rewards={name: _finite(value) for name, value in row["rewards"] or ()}, advantage=_finite(row["advantage"]),
        stop_reason=row["stop_reason"], task_id=row["task_id"], num_tokens=row["completion_tokens"],
        sequence=row["sequence"],
    )  # fmt: skip


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def settings(folder: str) -> dict[str, Any]:
    """Returns the fields of `RunSettings` that run.json contains, without a region that only observed.

    Raises:
        RecordError: If run.json is damaged, or a newer trustrl wrote it.
    """
    run = read_run(folder)
    if run is None:
        return {}
    engine, dtypes, sampling = (run[name] or {} for name in ("engine", "dtypes", "sampling"))
    more = engine.get("settings")
    more = more if isinstance(more, dict) else {}
    return {
        **{name: more.get(name) for name in _ENGINE},
        "region": None if run.get("region_role") == "observed" else run["region"],
        "engine": engine.get("name"), "engine_version": engine.get("version"),
        "model": run["tokenizer"] or run["model"], "trainer_dtype": dtypes.get("trainer"),
        "sampler_dtype": dtypes.get("sampler"),
        **{name: sampling.get(name) for name in ("temperature", "top_p", "top_k", "min_p")},
    }  # fmt: skip

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
from trustrl.recording.record_files import SEQUENCES, TEXTS, in_todays_schema, opened, parts_in, whole
from trustrl.recording.run_file import read_run
from trustrl.recording.storage import Place
from trustrl.runs.run import Completion

_COLUMNS = (
    "sequence", "step", "group", "task_id", "completion_tokens", "reward", "rewards", "advantage", "stop_reason",
    "text",
)  # fmt: skip

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
    texts = TextFiles(place)
    ranks: dict[int, list[Place]] = defaultdict(list)
    for file in parts_in(place, SEQUENCES):
        part = PartName.of(file.name)
        assert part is not None
        ranks[part.rank].append(file)
    # A merged file has many steps of one rank; each rank's files are in order.
    for row in merge(*(_rows(files, texts) for files in ranks.values()), key=lambda row: row["step"]):
        if row["sequence"] not in known:  # otherwise a later step on the same sequence
            known.add(row["sequence"])
            yield _completion(row, first)


def _rows(files: list[Place], texts: "TextFiles") -> Iterator[dict[str, Any]]:
    """Yields the sequences of one rank, each with its prompt and completion."""
    for file in files:
        with opened(file, "sequences") as (parquet, _):
            table = in_todays_schema(whole(parquet, file, "sequences"), "sequences", _COLUMNS)
        table = _with_texts(table, texts, file)
        # A reader of the first rows does not pay for the objects of all.
        for batch in table.to_batches(max_chunksize=256):
            yield from batch.to_pylist()


def _with_texts(table: Any, texts: "TextFiles", file: Place) -> Any:
    """Returns sequences with the columns `prompt` and `completion`, null where no text is recorded."""
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    held = [_texts(named) for named in texts.named(pc.unique(table["text"]).to_pylist(), file)]
    if not held:
        return table.append_column("prompt", pa.nulls(len(table))).append_column("completion", pa.nulls(len(table)))
    joined = pa.concat_tables(held)
    joined = joined.take(pa.array(range(len(joined) - 1, -1, -1)))  # of several texts, the last counts
    places = pc.index_in(table["sequence"], value_set=joined["sequence"])
    for name in ("prompt", "completion"):
        table = table.append_column(name, joined[name].take(places))
    return table


class TextFiles:
    """Text files of a record by the names in the sequence table, which stay as they were when files are merged."""

    def __init__(self, folder: Place) -> None:
        self._ranks: dict[int, list[tuple[PartName, Place]]] = defaultdict(list)
        self._folder = folder
        for file in parts_in(folder, TEXTS):
            part = PartName.of(file.name)
            assert part is not None
            self._ranks[part.rank].append((part, file))

    def named(self, names: Iterable[str | None], sequences: Place) -> list[Place]:
        """Returns the files that have the texts, each once: those of the rank that include the step.

        Args:
            names: The names, as the sequence table has them.
            sequences: The file of that table, for messages.

        Raises:
            RecordError: If a name does not belong to a part file.
        """
        return list(dict.fromkeys(self._file(name, sequences) for name in names if name is not None))

    def _file(self, name: str, sequences: Place) -> Place:
        part = PartName.of(name)
        if part is None:
            raise RecordError(f"`{sequences}` must name files in {TEXTS}/ in the column text, got {name!r:.80}.")
        own = self._ranks[part.rank]
        index = bisect_right(own, part.first, key=lambda entry: entry[0].first) - 1
        if index >= 0 and part.last <= own[index][0].last:
            return own[index][1]
        return storage.inside(storage.inside(self._folder, TEXTS), name)


def _texts(file: Place) -> Any:
    with opened(file, "texts") as (parquet, _):
        return whole(parquet, file, "texts", ["sequence", "prompt", "completion"])


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

"""Completions and settings from the sequence and text tables and run.json of token records."""

import math
from collections.abc import Iterator
from typing import Any

from trustrl.errors import RecordError
from trustrl.optional_imports import need
from trustrl.recording import storage
from trustrl.recording.record_files import SEQUENCES, TEXTS, in_todays_schema, named_numbers, opened, parts_in, whole
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
    for file in parts_in(place, SEQUENCES):
        with opened(file, "sequences") as (parquet, _):
            table = in_todays_schema(whole(parquet, file, "sequences"), "sequences", _COLUMNS)
        texts: dict[int, tuple[str | None, str | None]] = {}
        for name in need("pyarrow.compute", extra="records").unique(table["text"]).to_pylist():
            if name is not None:
                if named_numbers(name) is None:
                    raise RecordError(f"`{file}` must name files in {TEXTS}/ in the column text, got {name!r:.80}.")
                texts |= _texts(storage.inside(storage.inside(place, TEXTS), name))
        for row in table.to_pylist():
            if row["sequence"] in known:  # a later step on the same sequence
                continue
            known.add(row["sequence"])
            yield _completion(row, first, *texts.get(row["sequence"], (None, None)))


def _texts(file: Place) -> dict[int, tuple[str | None, str | None]]:
    with opened(file, "texts") as (parquet, _):
        table = whole(parquet, file, "texts", ["sequence", "prompt", "completion"])
    rows = zip(*(table[name].to_pylist() for name in ("sequence", "prompt", "completion")), strict=True)
    return {sequence: (prompt, text) for sequence, prompt, text in rows}


def _completion(row: dict[str, Any], first: int, prompt: str | None, text: str | None) -> Completion:
    group = None if row["group"] is None else f"{row['step']} {row['group']}"
    return Completion(
        step=row["step"] + first, prompt=prompt, text=text, group=group, reward=_finite(row["reward"]),
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

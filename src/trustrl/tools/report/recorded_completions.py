"""Completions from the sequence and text tables of a run's token records."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from trustrl.optional_imports import need
from trustrl.recording import storage
from trustrl.recording.record_files import TEXTS, opened
from trustrl.recording.sequence_tables import read_sequences
from trustrl.runs.run import Completion, Run
from trustrl.tools.report.reported_runs import measured_step


def recorded_completions(run: Run) -> Iterator[tuple[Completion, tuple[str, str] | None]]:
    """Yields the completions in the sequence tables, each with the folder and file of its text, if recorded.

    The completions have no texts yet; `with_texts` reads them.

    Raises:
        RecordError: If a file cannot be read.
    """
    for folder in run.records:
        known: set[int] = set()
        table = read_sequences(folder)
        names = ("sequence", "step", "group", "task_id", "completion_tokens", "reward", "rewards", "advantage")
        columns = [table[name].to_pylist() for name in (*names, "stop_reason", "text")]
        for sequence, step, group, task, tokens, reward, rewards, advantage, stop, text in zip(*columns, strict=True):
            if sequence in known:  # a later step on the same sequence
                continue
            known.add(sequence)
            found = Completion(
                step=measured_step(run, step), group=None if group is None else f"{step} {group}",
                reward=_finite(reward), rewards={name: _finite(value) for name, value in rewards or ()},
                advantage=_finite(advantage), stop_reason=stop, task_id=task, num_tokens=tokens, sequence=sequence,
            )  # fmt: skip
            yield found, None if text is None else (folder, text)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def with_texts(found: Mapping[int, tuple[Completion, tuple[str, str] | None]]) -> dict[int, Completion]:
    """Adds prompts and texts to completions, by key. Reads each text file once.

    Raises:
        RecordError: If a file cannot be read.
    """
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    wanted: dict[tuple[str, str], dict[int | None, int]] = {}
    for key, (one, text) in found.items():
        if text is not None:
            wanted.setdefault(text, {})[one.sequence] = key
    complete = {key: one for key, (one, _) in found.items()}
    for (folder, name), keys in wanted.items():
        with opened(storage.place(folder) / TEXTS / name, "texts") as (parquet, _):
            table = parquet.read(["sequence", "prompt", "completion"])
        rows: list[dict[str, Any]] = table.filter(
            pc.is_in(table["sequence"], value_set=pa.array(sorted(one for one in keys if one is not None), pa.int64()))
        ).to_pylist()
        for row in rows:
            key = keys[row["sequence"]]
            complete[key] = replace(complete[key], prompt=row["prompt"], text=row["completion"])
    return complete

"""Completions that TRL stores with `log_completions=True`: completions/completions_<step>.parquet."""

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

from trustrl.errors import MissingPackageError, TrustRLWarning
from trustrl.files import open_regular, read_regular
from trustrl.optional_imports import need
from trustrl.recording.decoded_size import check_rows
from trustrl.runs.part import Part, counted
from trustrl.runs.points import number, step_number
from trustrl.runs.readers.files import Files, first_line, stamped
from trustrl.runs.run import Completion, Row

NAME = "TRL completions"
_BASE = ("step", "prompt", "completion", "advantage", "image", "images")


_MEAN = re.compile("rewards/(.+)/mean")

DAMAGE = (OSError, ValueError, NotImplementedError, MemoryError, KeyError, TypeError, RuntimeError)
"""Errors that pyarrow raises for a damaged file."""


def read(files: Files, state: Part | None = None) -> list[Part]:
    """Returns the completions of a TRL run. Reads the footers now and the rows when they are asked for.

    Args:
        files: The files of the folder.
        state: The metrics of the same run, which tell validation samples from completions.
    """
    paths = files.matching("completions/completions_*.parquet", "completions_*.parquet")
    paths += files.matching("checkpoints/completions/completions_*.parquet")
    if not paths:
        return []
    paths.sort(key=lambda file: stamped(file.stem))
    part = Part(source=NAME, engine="trl")
    try:
        parquet = need("pyarrow.parquet", extra="records")
    except MissingPackageError as error:
        part.faults.append(f"{files.short(paths[0].parent)}: {error}")
        return [part]
    whole = [file for file in paths if _readable(file, files, part, parquet)]
    validation = [file for file in whole if state is not None and _is_validation(stamped(file.stem), state)]
    if validation:
        steps = ", ".join(str(stamped(file.stem)) for file in validation)
        part.found.append(f"validation samples instead of completions at steps {steps}, where TRL overwrote them")
        whole = [file for file in whole if file not in validation]
    if whole:
        rewards = _summed_rewards(state.rows) if state is not None else None
        part.completions = lambda: _completions(whole, rewards)
        part.settings["completions_per_prompt"] = _group_size(whole[0])
        part.found.append(f"completions in {counted(len(whole), 'file')} of {files.short(whole[0].parent)}")
    return [part]


def _readable(file: Path, files: Files, part: Part, parquet: Any) -> bool:
    """Returns True if the file's footer can be read and has the columns. Adds a fault if not."""
    try:
        with open_regular(file) as opened:
            names = parquet.read_schema(opened).names
    except DAMAGE as error:
        part.faults.append(f"{files.short(file)}: {first_line(error)}; left out")
        return False
    if "completion" in names and "prompt" in names:
        return True
    part.faults.append(f"{files.short(file)}: no columns prompt and completion; left out")
    return False


def _is_validation(step: int, state: Part) -> bool:
    """Returns True if an evaluation was the last to sample before this step was logged.

    TRL stores the samples of an evaluation under the same name, and again at updates on an earlier batch.
    """
    evaluated = max((evaluation_step for evaluation_step in state.evaluated if evaluation_step <= step), default=-1)
    sampled = max((row["step"] for row in state.rows if "reward" in row and row["step"] <= step), default=-1)
    return evaluated >= max(sampled, 0)


def _summed_rewards(rows: Sequence[Row]) -> list[str] | None:
    """Returns the reward functions if their logged means add up to the logged reward in every row, else None."""
    names = sorted({match[1] for row in rows for name in row if (match := _MEAN.fullmatch(name))})
    logged = [row for row in rows if row.get("reward") is not None]
    for row in logged:
        means = [row[key] for name in names if row.get(key := f"rewards/{name}/mean") is not None]
        if len(means) < len(names) or abs(sum(means) - row["reward"]) > 1e-4 * max(1.0, abs(row["reward"])):
            return None
    return names if names and logged else None


def _rows(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of one file, which holds at most one batch of rollouts."""
    parquet = need("pyarrow.parquet", extra="records")
    try:
        table = whole_table(file, parquet)
        rows = table.drop_columns([name for name in ("image", "images") if name in table.column_names]).to_pylist()
    except DAMAGE as error:
        warnings.warn(f"{file}: {first_line(error)}; left out", TrustRLWarning, stacklevel=2)
        return []
    return rows


def whole_table(file: Path, parquet: Any) -> Any:
    """Returns a Parquet file as a table, read without threads, if its rows as Python objects are within the limits.

    Arrow's threads may abort the process when it ends soon after a read of a Python object (apache/arrow#34314).
    """
    source = BytesIO(read_regular(file))
    check_rows(source)
    with parquet.ParquetFile(source, pre_buffer=False, page_checksum_verification=True) as opened:
        return opened.read(use_threads=False)


def _group_size(file: Path) -> int | None:
    """Returns the completions per prompt, or None if the file has one prompt only.

    TRL stores the completions of one prompt one after another.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrustRLWarning)  # the reader of the completions warns
        sizes = [len(list(same)) for _, same in groupby(str(row["prompt"]) for row in _rows(file))]
    return math.gcd(*sizes) if len(sizes) > 1 else None


def _completions(paths: Sequence[Path], names: Sequence[str] | None) -> Iterator[Completion]:
    """Yields the completions of each batch once. TRL stores a batch again at each later update on it."""
    before: list[tuple[Any, ...]] = []
    for file in paths:
        rows = _rows(file)
        now = [(str(row["prompt"]), str(row["completion"]), row.get("advantage")) for row in rows]
        if now == before:
            continue
        before = now
        size = _size(rows)
        for index, row in enumerate(rows):
            yield _completion({"step": stamped(file.stem), **row}, f"{index // size}", names)


def _size(rows: Sequence[Mapping[str, Any]]) -> int:
    sizes = [len(list(same)) for _, same in groupby(str(row["prompt"]) for row in rows)]
    return math.gcd(*sizes) if sizes else 1


def _completion(row: Mapping[str, Any], group: str, names: Sequence[str] | None) -> Completion:
    step = step_number(row["step"]) or 0
    rewards = {
        name: number(value)
        for name, value in row.items()
        if (name in names if names else name not in _BASE and (value is None or isinstance(value, float)))
    }
    known = [value for value in rewards.values() if value is not None]
    summable = (names is not None or len(rewards) == 1) and bool(known)
    return Completion(
        step=step, prompt=_text(row.get("prompt")), text=_text(row.get("completion")), group=f"{step}/{group}",
        reward=sum(known) if summable else None, rewards=rewards, advantage=number(row.get("advantage")),
    )  # fmt: skip


def _text(value: Any) -> str | None:
    """Returns the text of a prompt or completion, joining the messages of a conversation."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    parts = [(message.get("role"), message.get("content")) for message in value if isinstance(message, Mapping)]
    if len(parts) == 1:
        return parts[0][1] if isinstance(parts[0][1], str) else str(parts[0][1])
    return "\n".join(f"{role}: {content}" for role, content in parts)

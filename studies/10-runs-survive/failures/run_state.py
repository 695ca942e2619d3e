"""Comparison of a run directory with that of an uninterrupted run, and the state of one that was just killed."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

WITHOUT_CLOCK = ("seconds",)


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Returns the complete lines of a JSONL file, without what depends on the clock."""
    file = folder / f"{name}.jsonl"
    *lines, _ = file.read_text().split("\n") if file.exists() else [""]
    rows = [json.loads(line) for line in lines]
    return [{key: value for key, value in row.items() if key not in WITHOUT_CLOCK} for row in rows]


def differences(folder: Path, reference: Path) -> list[str]:
    """Returns the parts of a finished run that differ from the uninterrupted one, bit for bit."""
    found = [f"{name}.jsonl" for name in ("metrics", "evaluation") if rows_of(folder, name) != rows_of(reference, name)]
    results = [json.loads((one / "result.json").read_text()) | {"seconds": 0} for one in (folder, reference)]
    if results[0] != results[1]:
        found.append("result.json")
    found += [f"weights: {name}" for name in _other_tensors(folder, reference)]
    found += _other_records(folder / "records", reference / "records")
    return found


def _newest(folder: Path) -> Path:
    named = [one for one in (folder / "checkpoints").iterdir() if re.fullmatch("checkpoint-[0-9]+", one.name)]
    return max(named, key=lambda one: int(one.name.rpartition("-")[2]))


def _other_tensors(folder: Path, reference: Path) -> list[str]:
    """Returns the files of the last checkpoint whose tensors differ: weights, optimizer, schedule, random state."""
    import torch

    ours, theirs, found = _newest(folder), _newest(reference), []
    if ours.name != theirs.name:
        return [ours.name]
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        if _digest(ours / name) == _digest(theirs / name):
            continue
        if name == "model.safetensors":
            found.append(name)
            continue
        loaded = [torch.load(one / name, weights_only=False) for one in (ours, theirs)]  # this program wrote both
        if not _equal(*loaded):
            found.append(name)
    return found


def _equal(a: Any, b: Any) -> bool:
    import numpy
    import torch

    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _other_records(ours: Path, theirs: Path) -> list[str]:
    """Compares the tables. File names say which process wrote a step, and the column `text` repeats them."""
    from trustrl.recording import read, read_sequences, read_texts

    readers = {
        "tokens": lambda folder: read(folder).table,
        "sequences": lambda folder: read_sequences(folder).drop_columns("text"),
        "texts": read_texts,
    }
    return [f"records: {name}" for name, table in readers.items() if not table(ours).equals(table(theirs))]


def state_after(folder: Path) -> dict[str, Any]:
    """Describes what a kill left: steps that were logged, steps that can be read, and files that cannot."""
    from trustrl.errors import TrustRLError
    from trustrl.recording.record_files import parts_in, read_table

    logged = {row["step"]: row.get("trustrl/tokens", 0) for row in rows_of(folder, "metrics")}
    readable, tokens, broken = [], 0, []
    for part in parts_in(folder / "records") if (folder / "records").is_dir() else []:
        try:
            table = read_table(part)[0]
        except TrustRLError as error:
            broken.append(str(error))
            continue
        readable += sorted(step + 1 for step in table["step"].unique().to_pylist())
        tokens += len(table)
        keys = list(zip(*(table[name].to_pylist() for name in ("sequence", "position")), strict=True))
        if len(set(keys)) != len(keys):
            broken.append(f"{part.name} has rows twice")
    return {
        "logged": logged, "recorded": readable, "tokens": tokens, "unreadable": broken,
        "logged_but_not_recorded": sorted(set(logged) - set(readable)),
    }  # fmt: skip


def leftovers(folder: Path) -> list[str]:
    """Returns files that a finished run should not leave: scratch files, and checkpoints that were set aside."""
    found = [one.relative_to(folder) for one in folder.rglob("*") if one.name.startswith((".", "set-aside-"))]
    return sorted(str(one) for one in found if one.name != ".lock" and not one.parent.name.startswith("set-aside-"))

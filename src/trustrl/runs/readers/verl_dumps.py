"""verl's dumps of rollouts and validation samples: `<step>.jsonl` with input, output and score.

verl writes them to trainer.rollout_data_dir and trainer.validation_data_dir. They lack advantages and tokens.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trustrl.errors import TrustRLWarning
from trustrl.files import open_regular
from trustrl.runs.part import Part, counted
from trustrl.runs.points import number, step_number
from trustrl.runs.readers.files import Fault, Files, json_lines, opening, stamped
from trustrl.runs.run import Completion, Row

NAME = "verl dumps"
LOOKS_FOR = "<step>.jsonl with input, output and score, in trainer.rollout_data_dir"

_BASE = {"input", "output", "gts", "score", "step", "uid", "request_id"}
_VALIDATION = re.compile("val|eval|test", re.IGNORECASE)


def read(files: Files) -> list[Part]:
    """Returns a part for each folder of dumps."""
    folders: dict[Path, list[Path]] = defaultdict(list)
    patterns = [f"{'*/' * depth}[0-9]*.jsonl" for depth in range(5)]
    for file in files.matching(*patterns):
        if file.stem.isdecimal():
            folders[file.parent].append(file)
    parts: list[Part] = []
    for folder, dumps in sorted(folders.items()):
        dumps.sort(key=lambda file: stamped(file.stem))
        if any(map(_is_dump, dumps)):
            # Validation samples are in a folder of that name, or begin before the first step.
            validates = _VALIDATION.search(folder.name) or stamped(dumps[0].stem) == 0
            parts.append(_validation(files, dumps) if validates else _rollouts(files, dumps))
    return parts


def _is_dump(file: Path) -> bool:
    first = opening(file).partition(b"\n")[0]
    return first.startswith(b'{"input":') and b'"output":' in first


def _rollouts(files: Files, dumps: list[Path]) -> Part:
    where = files.short(dumps[0].parent)
    part = Part(source=NAME, engine="verl", row_is="batch")
    part.completions = lambda: _completions(dumps, where)
    part.faults = [fault for file in dumps if (fault := _ending(file, files.short(file)))]
    part.found.append(f"completions of {counted(len(dumps), 'step')} in {where}, without advantages and tokens")
    return part


def _ending(file: Path, short: str) -> str | None:
    """Returns the fault of a file whose last line is truncated, without reading the rest."""
    with open_regular(file) as opened:
        size = opened.seek(0, 2)
        if size == 0:
            return f"{short}: empty"
        opened.seek(-1, 2)
        return None if opened.read() == b"\n" else f"{short}: the last line is truncated; left out"


def _completions(dumps: Sequence[Path], where: str) -> Iterator[Completion]:
    for file in dumps:
        prompts: dict[str, int] = {}
        for line in json_lines(file, f"{where}/{file.name}"):
            if isinstance(line, Fault) or not isinstance(line[1], dict):
                said = line.text if isinstance(line, Fault) else f"{where}/{file.name}, line {line[0]}: not an object"
                warnings.warn(said, TrustRLWarning, stacklevel=2)
                continue
            yield _completion(line[1], stamped(file.stem), prompts)


def _completion(entry: dict[str, Any], step: int, prompts: dict[str, int]) -> Completion:
    text, prompt, uid = entry.get("output"), entry.get("input"), entry.get("uid")
    own = step_number(entry.get("step"))
    step = step if own is None else own
    if isinstance(uid, str):  # <uuid of the prompt>_<rollout>_<output>
        parts = uid.rsplit("_", 2)
        group = parts[0] if len(parts) == 3 else uid
    else:
        group = f"{step}/{prompts.setdefault(str(prompt), len(prompts))}"
    rewards = {
        name: number(value)
        for name, value in entry.items()
        if name not in _BASE and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return Completion(
        step=step, prompt=prompt if isinstance(prompt, str) else None, text=text if isinstance(text, str) else None,
        group=group, reward=number(entry.get("score")), rewards=rewards,
    )  # fmt: skip


def _validation(files: Files, dumps: list[Path]) -> Part:
    where = files.short(dumps[0].parent)
    part = Part(source=NAME, engine="verl", row_is="batch")
    for file in dumps:
        scores: list[float] = []
        for line in json_lines(file, files.short(file)):
            if isinstance(line, Fault):
                part.faults.append(line.text)
            elif isinstance(line[1], dict):
                value = number(line[1].get("acc", line[1].get("score")))
                scores += [] if value is None else [float(value)]
        row: Row = {"step": stamped(file.stem), "count": len(scores)}
        if scores and all(0 <= score <= 1 for score in scores):
            row["accuracy"] = sum(scores) / len(scores)
        if scores:
            part.evaluations.append(row)
    part.found.append(f"samples of {counted(len(part.evaluations), 'evaluation')} in {where}")
    return part

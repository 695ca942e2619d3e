"""TRL's `output_dir`: the trainer state of the newest checkpoint, and the completions.

`training_args.bin` is a pickle, so it is not read: the learning rate comes from the log history only.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from trustrl.runs.part import Part
from trustrl.runs.points import Points, step_number
from trustrl.runs.readers import trl_completions
from trustrl.runs.readers.files import Fault, Files, json_object, opening, stamped
from trustrl.runs.run import Row

NAME = "TRL trainer_state.json"
LOOKS_FOR = "trainer_state.json, checkpoint-*/trainer_state.json"

_VERSION = re.compile(r"^- TRL: (\S+)$", re.MULTILINE)
_MODEL = re.compile(r"^base_model: (\S+)$", re.MULTILINE)


def read(files: Files) -> list[Part]:
    """Returns the trainer state and the completions, if the folder has them."""
    state = _state(files)
    return [*state, *trl_completions.read(files, *state)]


def _state(files: Files) -> list[Part]:
    """Returns the newest trainer state that can be read: the folder's own, or that of the newest checkpoint."""
    states = files.matching("checkpoint-*/trainer_state.json")
    states = [*files.matching("trainer_state.json"), *sorted(states, key=lambda file: -stamped(file.parent.name))]
    if not states:
        return []
    part = Part(source=NAME, engine="trl")
    for file in states:
        state = json_object(file, files.short(file))
        if isinstance(state, Fault):
            part.faults.append(state.text)
            continue
        if not isinstance(state.get("log_history"), list):
            part.faults.append(f"{files.short(file)}: no log_history; left out")
            continue
        _take(part, state, files.short(file))
        break
    _card(part, files.root)
    return [part]


def _take(part: Part, state: Mapping[str, Any], short: str) -> None:
    points = Points()
    for index, entry in enumerate(state["log_history"]):
        step = step_number(entry.get("step")) if isinstance(entry, dict) else None
        if step is None:
            part.faults.append(f"{short}, log_history[{index}]: not an object with a step; left out")
            continue
        points.add(step, {name: value for name, value in entry.items() if name != "step"})
        if isinstance(entry.get("train_runtime"), (int, float)):
            part.seconds = float(entry["train_runtime"])
    part.take(points, short)
    planned = step_number(state.get("max_steps"))
    every = state.get("logging_steps")
    if isinstance(every, int) and not isinstance(every, bool) and every > 1:
        part.steps_per_row = every
        part.found.append(f"each row averages {every} optimizer steps (logging_steps)")
    part.settings = {"steps_planned": planned or None, "updates_per_batch": updates_per_batch(part.rows, every)}
    rates = [row["learning_rate"] for row in part.rows if row.get("learning_rate") is not None]
    if rates:
        part.settings["learning_rate"] = max(rates)
        part.found.append("learning rate: the largest of the log history")
    if part.settings["updates_per_batch"] is not None:
        part.found.append(
            f"updates per batch: {part.settings['updates_per_batch']}, the steps between two logged rewards"
        )


def updates_per_batch(rows: Sequence[Row], logging_steps: Any) -> int | None:
    """Returns the updates on each batch of rollouts, or None if the rows do not tell.

    TRL logs the reward only at the first update of a batch.

    Example:
        >>> updates_per_batch([{"step": step, **({"reward": 1.0} if step % 2 else {})} for step in range(1, 7)], 1)
        2
    """
    if logging_steps != 1:
        return None
    steps = [row["step"] for row in rows if "reward" in row]
    gaps = {after - before for before, after in pairwise(steps)}
    return math.gcd(*gaps) if gaps and len(rows) == rows[-1]["step"] - rows[0]["step"] + 1 else None


def _card(part: Part, folder: Path) -> None:
    """Adds the versions that the model card names."""
    text = opening(folder / "README.md").decode("utf-8", errors="replace")
    for name, pattern in (("engine_version", _VERSION), ("model", _MODEL)):
        if match := pattern.search(text):
            part.settings[name] = match[1]

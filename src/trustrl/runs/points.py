"""Metrics by step as a reader collects them, and their division into training rows and evaluations."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from trustrl.limits import Meter
from trustrl.runs.metric_names import engine_of, is_validation, our_name, score_names
from trustrl.runs.run import Row

LARGEST_STEP = 2**53
COST = 200
"""Bytes that a value takes here and in the row made of it, and a step without its values."""


def number(value: Any) -> float | int | None:
    """Returns a finite number, or None if the value is anything else.

    Example:
        >>> number(3), number(float("nan")), number("3"), number(True)
        (3, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond float64
        return None


def step_number(value: Any) -> int | None:
    """Returns the value as a step: a whole number from 0, or None.

    Example:
        >>> step_number(3.0), step_number(-1), step_number("x")
        (3, None, None)
    """
    step = number(value)
    return int(step) if step is not None and step == int(step) and 0 <= step < LARGEST_STEP else None


SUMMARY = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss")
"""Metrics of the whole training, which transformers logs with the last step."""


class Points:
    """Metrics by step, under the names of the source."""

    def __init__(self) -> None:
        self.by_step: dict[int, dict[str, Any]] = defaultdict(dict)
        self._names: dict[str, str] = {}
        self._meter = Meter("the metrics")

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds metrics of one step. Values that are not numbers are left out; NaN and infinity become None.

        Raises:
            OverLimit: If the metrics of all steps could take more memory than allowed.
        """
        row = self.by_step[step]
        before = len(row)
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                row[self._name(name)] = number(value)
            elif value is None:
                row.setdefault(self._name(name), None)
        self._meter.add(COST * (len(row) - before + 2 * (before == 0)))

    def _name(self, name: object) -> str:
        """Returns one string for all equal names."""
        text = str(name)
        if text not in self._names:
            self._meter.add(2 * len(text))
            self._names[text] = text
        return self._names[text]

    def names(self) -> set[str]:
        """Returns the names of all metrics."""
        return {name for metrics in self.by_step.values() for name in metrics}

    def engine(self) -> str | None:
        """Returns the trainer that logs these names, or None."""
        return engine_of(self.names())

    def renamed(self, engine: str | None) -> list[Row]:
        """Returns all metrics in order of steps, under our names, without TRL's summary at the end of training.

        The trainer's own `trustrl/` metrics win over those that are renamed to the same.
        """
        rows: list[Row] = []
        for step in sorted(self.by_step):
            row: Row = {"step": step}
            for name, value in sorted(self.by_step[step].items(), key=lambda item: "trustrl/" in item[0]):
                name = our_name(name, engine)
                if name not in SUMMARY:
                    row[name] = value
            row["step"] = step
            rows.append(row)
        return rows


def divided(rows: list[Row]) -> tuple[list[Row], list[Row], str | None]:
    """Returns training rows, evaluations, and the metrics that the accuracy is the mean of.

    A score counts as accuracy only if all of its values lie between 0 and 1. Without an accuracy, validation metrics
    stay in the rows.

    Example:
        >>> divided([{"step": 1, "loss": 0.5}, {"step": 1, "eval_reward": 0.25}])
        ([{'step': 1, 'loss': 0.5}], [{'step': 1, 'accuracy': 0.25, 'eval_reward': 0.25}], 'eval_reward')
    """
    scores = score_names({name for row in rows for name in row})
    values = [row[name] for row in rows for name in scores if row.get(name) is not None]
    if any(not 0 <= value <= 1 for value in values):
        scores = []
    training: list[Row] = []
    evaluations: list[Row] = []
    for row in rows:
        own = [row[name] for name in scores if row.get(name) is not None]
        if own:
            validation = {name: value for name, value in row.items() if is_validation(name)}
            evaluations.append({"step": row["step"], "accuracy": sum(own) / len(own), **validation})
            row = {name: value for name, value in row.items() if name not in validation}
        if any(name not in BESIDES and not name.startswith("timing_s/") for name in row):
            training.append(row)
    return training, evaluations, ", ".join(scores) or None


BESIDES = {"step", "epoch", "training/global_step", "training/epoch"}
"""Metrics that do not make a row by themselves."""

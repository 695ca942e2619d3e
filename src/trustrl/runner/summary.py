"""What a run amounts to, from its metrics alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

COLLAPSE = (
    "A run collapsed when the mean reward of its last tenth of steps is below half of that of its best tenth, or when "
    "a loss is not finite."
)

NO_METRICS = "This run has no metrics: it ended before its first step, or has not come that far. Read its log."


def tenth(rewards: Sequence[float]) -> int:
    """Steps in a tenth of the run, at least one."""
    return max(1, math.ceil(len(rewards) / 10))


def windows(values: Sequence[float], width: int) -> list[float]:
    """Means of `width` values in a row, by their last; shorter at the start."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def collapsed(rows: Sequence[dict[str, Any]]) -> bool:
    """See `COLLAPSE`."""
    if any("loss" in row and row["loss"] is None for row in rows):
        return True
    rewards = rewards_of(rows)
    if not rewards:
        return False
    width = tenth(rewards)
    means = windows(rewards, width)[width - 1 :]
    return means[-1] < max(means) / 2


def rewards_of(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Each step's mean reward."""
    return [row["reward"] for row in rows if row.get("reward") is not None]


def steps_to(rows: Sequence[dict[str, Any]], threshold: float) -> int | None:
    """The first step at which the mean reward of the last tenth of the run's length has reached the threshold."""
    rewarded = [row for row in rows if row.get("reward") is not None]
    rewards = rewards_of(rewarded)
    width = tenth(rewards)
    for at, mean in enumerate(windows(rewards, width)):
        if at >= width - 1 and mean >= threshold:
            return rewarded[at]["step"]
    return None


def mean_of(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """A metric's mean over the steps that have it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def summary(rows: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A finished run in one object."""
    rewards = rewards_of(rows)
    width = tenth(rewards)
    means = windows(rewards, width)[width - 1 :]
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "accuracy_before": evaluations[0]["accuracy"] if evaluations else None,
        "accuracy_after": evaluations[-1]["accuracy"] if evaluations else None,
        "reward_first_tenth": means[0] if means else None,
        "reward_last_tenth": means[-1] if means else None,
        "reward_best_tenth": max(means) if means else None,
        "masked_share": mean_of(rows, "trustrl/masked_share"),
        "projected_share": mean_of(rows, "trustrl/projected_share"),
        "collapsed": collapsed(rows),
    }

"""Verdict on one run, computed from its metrics and evaluations alone: accuracies, rewards, and collapse."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

FEWEST_ROLLOUTS = 3
"""Smallest number of rollouts in a mean reward. A single rollout of a few dozen completions is mostly noise."""

STANDARD_ERRORS = 2

COLLAPSE = (
    f"A run collapsed if its last held-out accuracy is below its first by more than {STANDARD_ERRORS} standard "
    "errors of the difference. Before a second evaluation, the reward decides: the mean of the last "
    f"{FEWEST_ROLLOUTS} rollouts (or of a tenth of them, if that is more) is below half of the best such mean, or "
    "below half of the first rollout's. A run with a loss that is not finite counts as collapsed."
)

NO_METRICS = "This run has no metrics: it ended before its first step, or has not reached it yet. Read its log."


def tenth(rewards: Sequence[float]) -> int:
    """Returns the number of steps in a tenth of the run, at least one."""
    return max(1, math.ceil(len(rewards) / 10))


def windows(values: Sequence[float], width: int) -> list[float]:
    """Returns the running mean over the last `width` values, over fewer at the start."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def rollouts(rows: Sequence[Mapping[str, Any]], updates_per_batch: int) -> list[Mapping[str, Any]]:
    """Returns the first row of each rollout that has a reward.

    TRL logs a row for every update and repeats the rollout's reward in each; verl logs one row for the whole batch.
    Both count steps in updates.

    Example:
        >>> rows = [{"step": step, "reward": (step - 1) // 4} for step in range(1, 9)]
        >>> [row["step"] for row in rollouts(rows, 4)]
        [1, 5]
    """
    first_rows: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        if "reward" in row:
            first_rows.setdefault((row["step"] - 1) // updates_per_batch, row)
    return list(first_rows.values())


def lowest_accuracy(evaluations: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the held-out accuracy below which a run has collapsed; None before a second evaluation.

    The standard error treats the two evaluations as independent samples of `count` problems each.
    """
    if len(evaluations) < 2:
        return None
    first, last = evaluations[0], evaluations[-1]
    counted = [(row["accuracy"], row["count"]) for row in (first, last) if row.get("count")]
    variance = sum(accuracy * (1 - accuracy) / count for accuracy, count in counted)
    return first["accuracy"] - STANDARD_ERRORS * math.sqrt(variance)


def lowest_reward(rewards: Sequence[float]) -> float | None:
    """Returns the mean reward of the last rollouts below which the reward has fallen; None with too few rollouts."""
    means = _means(rewards)
    return max(*means, rewards[0]) / 2 if means else None


def rollouts_in_a_mean(count: int) -> int:
    """Returns the number of rollouts in each mean of the verdict: a tenth, at least `FEWEST_ROLLOUTS`."""
    return max(FEWEST_ROLLOUTS, math.ceil(count / 10))


def _means(rewards: Sequence[float]) -> list[float]:
    width = rollouts_in_a_mean(len(rewards))
    return windows(rewards, width)[width - 1 :]


def collapsed(
    rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], updates_per_batch: int
) -> bool:
    """Returns True if a run collapsed, by the rule in `COLLAPSE`."""
    if any("loss" in row and row["loss"] is None for row in rows):
        return True
    lowest = lowest_accuracy(evaluations)
    if lowest is not None:
        return evaluations[-1]["accuracy"] < lowest
    rewards = rewards_of(rollouts(rows, updates_per_batch))
    lowest = lowest_reward(rewards)
    return lowest is not None and _means(rewards)[-1] < lowest


def rewards_of(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the mean reward of each row that has one."""
    return [row["reward"] for row in rows if row.get("reward") is not None]


def steps_to(rows: Sequence[dict[str, Any]], threshold: float) -> int | None:
    """Returns the first step at which the running mean reward over a tenth of the run reaches the threshold."""
    rewarded = [row for row in rows if row.get("reward") is not None]
    rewards = rewards_of(rewarded)
    width = tenth(rewards)
    for index, mean in enumerate(windows(rewards, width)):
        if index >= width - 1 and mean >= threshold:
            return rewarded[index]["step"]
    return None


def mean_of(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Returns the mean of a metric over the steps that have it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def summary(
    rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], updates_per_batch: int
) -> dict[str, Any]:
    """Returns a run's verdict: accuracies, rewards over rollouts, masked and projected shares, and collapse.

    `reward_first`, `reward_last` and `reward_best` are means over `FEWEST_ROLLOUTS` rollouts, or a tenth of them if
    that is more, or over all of them if there are fewer.
    """
    rewards = rewards_of(rollouts(rows, updates_per_batch))
    means = _means(rewards) or windows(rewards, FEWEST_ROLLOUTS)[-1:]
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "rollouts": len(rewards),
        "accuracy_before": evaluations[0]["accuracy"] if evaluations else None,
        "accuracy_after": evaluations[-1]["accuracy"] if evaluations else None,
        "reward_first": means[0] if means else None,
        "reward_last": means[-1] if means else None,
        "reward_best": max(means) if means else None,
        "masked_share": mean_of(rows, "trustrl/masked_share"),
        "projected_share": mean_of(rows, "trustrl/projected_share"),
        "collapsed": collapsed(rows, evaluations, updates_per_batch),
    }

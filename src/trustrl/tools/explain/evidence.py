"""Metrics of a run, arranged by batch and update for the rules.

Rules count batches of rollouts, not steps: trainers log a row for each update, for each batch, or for every ten steps.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from trustrl.runs.run import Row, Run
from trustrl.runs.run_verdict import FEWEST_ROLLOUTS, rollouts_in_a_mean, windows
from trustrl.tools.explain.metric_sources import EQUAL, GRADIENT, REWARD, named

EQUAL_GROUPS = 0.9
"""Share of groups with identical rewards from which a batch has no learning signal. Their advantages are 0."""

Point = tuple[int, float]
"""A step and the value measured there."""


@dataclass(frozen=True)
class Evidence:
    """One run, as the rules read it."""

    run: Run

    @cached_property
    def rows(self) -> list[Row]:
        """Rows in order of steps, with the metrics that follow from others."""
        return sorted(map(named, self.run.rows), key=lambda row: row["step"])

    @cached_property
    def spacing(self) -> int:
        """Steps from one row to the next."""
        steps = [row["step"] for row in self.rows]
        return int(median(b - a for a, b in itertools.pairwise(steps))) if len(steps) > 1 else 1

    @property
    def by_update(self) -> bool:
        """True if each row is one optimizer step. Otherwise a row is a mean over several."""
        return self.run.row_is == "update" and self.spacing == 1

    @cached_property
    def updates_per_batch(self) -> int | None:
        """The setting, or the distance between rows with a reward if it is unknown. None if neither is known."""
        known = self.run.settings.updates_per_batch
        return known if known is not None else self.updates_from_rewards

    @cached_property
    def updates_from_rewards(self) -> int | None:
        """Distance between rows with a reward, if it is constant. TRL logs the reward when it samples a batch."""
        steps = [row["step"] for row in self.rows if REWARD in row]
        gaps = {b - a for a, b in itertools.pairwise(steps)}
        return gaps.pop() if self.by_update and len(steps) > FEWEST_ROLLOUTS and len(gaps) == 1 else None

    @cached_property
    def batches(self) -> list[list[Row]]:
        """Rows of each batch of rollouts. A row that covers several batches counts as one."""
        updates = self.updates_per_batch
        if self.run.row_is == "batch" or updates is None:
            return [[row] for row in self.rows]
        batches: dict[int, list[Row]] = {}
        for row in self.rows:
            batches.setdefault((row["step"] - 1) // updates, []).append(row)
        return list(batches.values())

    def per_batch(self, metric: str) -> list[Point]:
        """Returns the first finite value of each batch, for metrics of the rollouts themselves."""
        return [series[0] for rows in self.batches if (series := points(rows, metric))]

    def at_update(self, index: int, metric: str) -> list[Point]:
        """Returns the values at one update of each batch that has a gradient; −1 is the last update.

        The list is empty if rows are not single updates or the number of updates per batch is unknown.
        """
        updates = self.updates_per_batch
        if not self.by_update or updates is None:
            return []
        wanted = index % updates
        rows = [row for batch in self.moving for row in batch if (row["step"] - 1) % updates == wanted]
        return points(rows, metric)

    @cached_property
    def moving(self) -> list[list[Row]]:
        """Batches with a gradient. If all groups of a batch have equal rewards, the policy does not move."""
        return [rows for rows in self.batches if not _is_still(rows)]

    @cached_property
    def rewards(self) -> list[float]:
        """Mean reward of each batch."""
        return [reward for _, reward in self.per_batch(REWARD)]

    @cached_property
    def mean_rewards(self) -> list[float]:
        """Running means over at least `FEWEST_ROLLOUTS` batches. Empty if there are fewer."""
        width = rollouts_in_a_mean(len(self.rewards))
        return windows(self.rewards, width)[width - 1 :]

    @property
    def last_reward(self) -> float | None:
        """Mean reward of the last batches, or None if there are too few."""
        return self.mean_rewards[-1] if self.mean_rewards else None

    @cached_property
    def evaluations(self) -> list[Row]:
        """Evaluations whose number of problems is known, so that their standard error is too."""
        return [row for row in self.run.evaluations if row.get("count") and row.get("accuracy") is not None]


def _is_still(rows: Sequence[Row]) -> bool:
    equal, gradients = points(rows, EQUAL), points(rows, GRADIENT)
    if equal:
        return equal[0][1] >= EQUAL_GROUPS
    return bool(gradients) and max(norm for _, norm in gradients) == 0


def points(rows: Sequence[Mapping[str, Any]], metric: str) -> list[Point]:
    """Returns the finite values of a metric with their steps."""
    return [(row["step"], float(row[metric])) for row in rows if row.get(metric) is not None]


def middle(series: Sequence[Point]) -> float:
    """Returns the median value, which single batches do not affect."""
    return median(value for _, value in series)


def first_and_last(series: Sequence[Point], share: int) -> tuple[Sequence[Point], Sequence[Point]] | None:
    """Returns the first and the last values: one of `share` parts, and at least `FEWEST_ROLLOUTS` values each.

    Returns:
        None if the two would overlap, since a window of one batch shows nothing.
    """
    width = max(FEWEST_ROLLOUTS, len(series) // share)
    return (series[:FEWEST_ROLLOUTS], series[-width:]) if len(series) >= width + FEWEST_ROLLOUTS else None

"""Metrics of a run directory, arranged by batch and update for the rules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from trustrl.errors import ConfigError, RecordError, UnknownNameError
from trustrl.recording.record_files import RECORDS
from trustrl.runner.directory import RunDirectory
from trustrl.runner.recipe import Recipe, load
from trustrl.runner.run_verdict import NO_METRICS, rollouts, summary

EQUAL = "frac_reward_zero_std"
EQUAL_GROUPS = 0.9
"""Share of groups with identical rewards from which a batch has no learning signal. Their advantages are 0."""

Row = dict[str, Any]
Point = tuple[int, float]
"""A step and the value measured there."""


@dataclass(frozen=True)
class Evidence:
    """Recipe, metrics, and evaluations of one run."""

    path: Path
    recipe: Recipe
    rows: list[Row]
    evaluations: list[Row]

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """Summary of the run by the rules of `trustrl.runner.run_verdict`."""
        return summary(self.rows, self.evaluations, self.recipe.schedule.updates_per_batch)

    @cached_property
    def rollouts(self) -> list[Point]:
        """First step and mean reward of each rollout."""
        return points(rollouts(self.rows, self.recipe.schedule.updates_per_batch), "reward")

    @property
    def records(self) -> Path:
        """Folder of the recorded tokens. It may not exist."""
        return self.path / RECORDS

    @property
    def updates_per_step(self) -> int:
        """Updates per row of metrics. A step is one update in TRL and a whole batch in verl."""
        return 1 if self.recipe.engine.name == "trl" else self.recipe.schedule.updates_per_batch

    def update_of(self, row: Row) -> int:
        """Returns the index, from 0, of a TRL row's update within its batch."""
        return (row["step"] - 1) % self.recipe.schedule.updates_per_batch

    def first_updates(self) -> list[Row]:
        """Returns the first row of each batch."""
        return self.rows if self.updates_per_step > 1 else [row for row in self.rows if self.update_of(row) == 0]

    def second_updates(self) -> list[Row]:
        """Returns the second row of each batch, after one optimizer step.

        The list is empty if each row covers a batch or each batch has one update.
        """
        return [] if self.updates_per_step > 1 else [row for row in self._moving() if self.update_of(row) == 1]

    def last_updates(self) -> list[Row]:
        """Returns the last row of each batch, or its only row."""
        last = self.recipe.schedule.updates_per_batch - 1
        moving = self._moving()
        return moving if self.updates_per_step > 1 else [row for row in moving if self.update_of(row) == last]

    def _moving(self) -> list[Row]:
        """Returns the rows with a gradient. If all groups have equal rewards, the policy does not move."""
        return [row for row in self.rows if (row.get(EQUAL) or 0.0) < EQUAL_GROUPS]


def read_evidence(folder: Path) -> Evidence:
    """Reads a run directory.

    Raises:
        ConfigError: If the folder is not a run directory.
        RecordError: If a file cannot be read, or the run has no metrics.
    """
    if not (folder / "recipe.toml").is_file():
        raise ConfigError(
            f"RUN must be a run directory that `trustrl run` created, got {folder}, which has no recipe.toml."
        )
    directory = RunDirectory(folder)
    rows, evaluations = (sorted(directory.rows(name), key=_step) for name in ("metrics", "evaluation"))
    recipe = _recipe(folder / "recipe.toml")
    if not rows:
        raise RecordError(f"{folder}: {NO_METRICS}")
    return Evidence(folder, recipe, rows, evaluations)


def _recipe(file: Path) -> Recipe:
    try:
        try:
            return load(file)
        except UnknownNameError:  # a user's region, not registered here; no rule reads it, so a preset replaces it
            return load(file, ["region.preset=pg-is"])
    except ConfigError as error:
        raise RecordError(f"The recipe of a run must be complete, got {file}: {error}") from None


def points(rows: Sequence[Mapping[str, Any]], metric: str) -> list[Point]:
    """Returns the finite values of a metric with their steps."""
    return [(row["step"], float(row[metric])) for row in rows if row.get(metric) is not None]


def middle(found: Sequence[Point]) -> float:
    """Returns the median value, which single steps do not affect."""
    return median(value for _, value in found)


def _step(row: Row) -> int:
    return row["step"]

"""A run's folder as the rules see it: steps laid out by batch and update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from trustrl.errors import ConfigError, RecordError, UnknownNameError
from trustrl.recording.files import RECORDS
from trustrl.runner.directory import RunDirectory
from trustrl.runner.recipe import Recipe, load
from trustrl.runner.summary import NO_METRICS, rollouts, summary

EQUAL = "frac_reward_zero_std"
EQUAL_GROUPS = 0.9
"""Share of groups in which all rewards are the same: advantages are 0 there, and nothing is learnt from them."""

Row = dict[str, Any]
Point = tuple[int, float]
"""A step and what was measured there."""


@dataclass(frozen=True)
class Evidence:
    """What a folder holds."""

    path: Path
    recipe: Recipe
    rows: list[Row]
    evaluations: list[Row]

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """Verdict on the run, by the rules of `trustrl.runner.summary`."""
        return summary(self.rows, self.evaluations, self.recipe.schedule.updates_per_batch)

    @cached_property
    def rollouts(self) -> list[Point]:
        """First step and mean reward of each rollout."""
        return points(rollouts(self.rows, self.recipe.schedule.updates_per_batch), "reward")

    @property
    def records(self) -> Path:
        """Where its tokens are, if it recorded any."""
        return self.path / RECORDS

    @property
    def updates_per_step(self) -> int:
        """Updates that one row of metrics sums up: in verl a step is a whole batch, in TRL one update."""
        return 1 if self.recipe.engine.name == "trl" else self.recipe.schedule.updates_per_batch

    def update_of(self, row: Row) -> int:
        """Which update of its batch a row of TRL's is, from 0."""
        return (row["step"] - 1) % self.recipe.schedule.updates_per_batch

    def first_updates(self) -> list[Row]:
        """One row of each batch: its first."""
        return self.rows if self.updates_per_step > 1 else [row for row in self.rows if self.update_of(row) == 0]

    def second_updates(self) -> list[Row]:
        """After one step of the optimiser on each batch; none where rows sum up a batch or a batch has one update."""
        return [] if self.updates_per_step > 1 else [row for row in self._moving() if self.update_of(row) == 1]

    def last_updates(self) -> list[Row]:
        """One row of each batch: its last, or the one that sums it up."""
        last = self.recipe.schedule.updates_per_batch - 1
        moving = self._moving()
        return moving if self.updates_per_step > 1 else [row for row in moving if self.update_of(row) == last]

    def _moving(self) -> list[Row]:
        """Rows with a gradient: where all groups have equal rewards, nothing moves, whatever the size of a step."""
        return [row for row in self.rows if (row.get(EQUAL) or 0.0) < EQUAL_GROUPS]


def read_evidence(folder: Path) -> Evidence:
    """What is in a run's folder.

    Raises:
        ConfigError: it is no run's folder.
        RecordError: a file in it cannot be read, or no step was measured.
    """
    if not (folder / "recipe.toml").is_file():
        raise ConfigError(f"RUN must be a folder that `trustrl run` made, got {folder}, which has no recipe.toml.")
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
        except UnknownNameError:  # a region of somebody's own; no rule looks at it, so any other stands in
            return load(file, ["region.preset=pg-is"])
    except ConfigError as error:
        raise RecordError(f"The recipe of a run must be whole, got {file}: {error}") from None


def points(rows: Sequence[Mapping[str, Any]], metric: str) -> list[Point]:
    """A metric over the steps that have it and where it was finite."""
    return [(row["step"], float(row[metric])) for row in rows if row.get(metric) is not None]


def middle(found: Sequence[Point]) -> float:
    """Their median: single steps do not move it."""
    return median(value for _, value in found)


def _step(row: Row) -> int:
    return row["step"]

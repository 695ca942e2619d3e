"""Differences of two runs, each with its first step: in settings, in the data they sampled for, and in each metric.

A metric parts at the first of three batches in a row in which the runs differ, in one direction, by more than three
times the noise. The noise of a run is its usual step from one batch to the next, so a slow drift does not count.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from trustrl.runs.first_completions import MOST_COMPLETIONS
from trustrl.runs.run import Run
from trustrl.runs.run_verdict import FEWEST_ROLLOUTS
from trustrl.tools.explain import Evidence, Point, points
from trustrl.tools.report.charts import Chart

TIMES_NOISE = 3.0
"""Difference, in standard deviations, above which two batches differ. Independent normal noise does so three times in a
row once in 10^8 batches."""

RULE = (
    "A metric parts at the first of three batches in a row in which the runs differ, in one direction, by more than "
    "three times the noise: the usual step of both runs from one batch to the next. Batches are compared by their "
    "number, each by its mean."
)

FEWEST_BATCHES = 2 * FEWEST_ROLLOUTS
"""Fewest batches that tell the noise of a metric."""

_MEDIAN_TO_DEVIATION = 1 / (0.6745 * math.sqrt(2))
"""Standard deviation of normal noise, as a multiple of the median |difference| of neighbors."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that two runs have differently. None where a run's files lack it."""

    name: str
    first: Any
    other: Any


@dataclass(frozen=True, slots=True)
class MetricParting:
    """The batch from which a metric differs."""

    key: str
    """Key of the metric's chart."""

    title: str
    step: int
    """Step of the other run."""

    first: float
    """Value of the first run there: the mean over the batch."""

    other: float


@dataclass(frozen=True, slots=True)
class Parting:
    """Differences of a run from the first run of the report, each with its first step."""

    run: int
    """Index of the run in the report."""

    settings: list[Setting]
    data_step: int | None
    """First step whose prompts differ. None if none does, or if prompts were not compared."""

    data_steps: int
    """Steps whose prompts were compared. 0 without prompts in both runs."""

    metrics: list[MetricParting]
    """In the order in which they part."""

    alike: list[str]
    """Titles of the metrics that were compared and do not part."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `trustrl report --json` prints."""
        return asdict(self)

    def data_words(self) -> str:
        """Returns the comparison of the prompts."""
        if not self.data_steps:
            return "not compared: both runs must have stored prompts"
        if self.data_step is None:
            return f"the same prompts at all {self.data_steps:,} steps compared"
        return f"other prompts from step {self.data_step}"


def parting(index: int, first: Evidence, other: Evidence, charts: Sequence[Chart]) -> Parting:
    """Compares a run with the first one.

    Args:
        index: Index of the run in the report.
        first: The first run.
        other: The run.
        charts: The charts of the report.
    """
    data_step, data_steps = _data(first, other)
    parted, alike = list[MetricParting](), list[str]()
    for chart in charts:
        if chart.other or not chart.metric or not {0, index} <= {line.run for line in chart.lines}:
            continue
        a, b = _by_batch(first, chart.metric), _by_batch(other, chart.metric)
        if min(len(a), len(b)) < FEWEST_BATCHES:
            continue
        place = _first_apart(a, b)
        if place is None:
            alike.append(chart.title)
        else:
            parted.append(MetricParting(chart.key, chart.title, b[place][0], a[place][1], b[place][1]))
    settings = _settings(first.run, other.run)
    return Parting(index, settings, data_step, data_steps, sorted(parted, key=lambda metric: metric.step), alike)


def _by_batch(run: Evidence, metric: str) -> list[Point]:
    """Returns the mean of a metric over each batch, with the batch's first step."""
    series = list[Point]()
    for rows in run.batches:
        values = points(rows, metric)
        if values:
            series.append((rows[0]["step"], sum(value for _, value in values) / len(values)))
    return series


def _first_apart(a: Sequence[Point], b: Sequence[Point]) -> int | None:
    """Returns the first of three batches in a row that differ in one direction by more than the noise, or None.

    Example:
        >>> flat, jumped = ([(step, step % 2 + jump * (step > 9)) for step in range(20)] for jump in (0, 20))
        >>> _first_apart(flat, jumped), _first_apart(flat, flat)
        (10, None)
    """
    limit = TIMES_NOISE * math.hypot(_noise(a), _noise(b))
    sides = [0 if abs(y - x) <= limit else int(math.copysign(1, y - x)) for (_, x), (_, y) in zip(a, b, strict=False)]
    starts = range(len(sides) - FEWEST_ROLLOUTS + 1)
    return next((i for i in starts if abs(sum(sides[i : i + FEWEST_ROLLOUTS])) == FEWEST_ROLLOUTS), None)


def _noise(series: Sequence[Point]) -> float:
    return _MEDIAN_TO_DEVIATION * median(abs(y - x) for (_, x), (_, y) in pairwise(series))


def _data(first: Evidence, other: Evidence) -> tuple[int | None, int]:
    """Returns the first step whose prompts differ, and the number of steps compared."""
    a, b = (dict(_prompts(run)) for run in (first, other))
    shared = sorted(a.keys() & b.keys())
    return next((step for step in shared if a[step] != b[step]), None), len(shared)


def _prompts(run: Evidence) -> list[tuple[int, int]]:
    batches = run.sampled
    if sum(batch.completions for batch in batches) >= MOST_COMPLETIONS:
        batches = batches[:-1]  # read in part
    return [(batch.step, batch.prompts) for batch in batches if batch.prompts is not None]


def _settings(first: Run, other: Run) -> list[Setting]:
    a, b = _flat(first), _flat(other)
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    kinds = [name.removesuffix("kind") for name in names if name.endswith(".kind")]
    # Tables of different kinds have different settings, so the kind says enough.
    names = [name for name in names if not any(name.startswith(kind) and name != f"{kind}kind" for kind in kinds)]
    return [Setting(name, a.get(name), b.get(name)) for name in names]


def _flat(run: Run) -> dict[str, Any]:
    """Returns the recipe, or without one the settings, with dots in the names of nested ones."""
    flat: dict[str, Any] = {}

    def add(table: Mapping[str, Any], before: str) -> None:
        for key, value in table.items():
            if isinstance(value, Mapping):
                add(value, f"{before}{key}.")
            elif value is not None:
                flat[f"{before}{key}"] = value

    add({key: value for key, value in run.recipe.items() if key != "name"} or asdict(run.settings), "")
    return flat

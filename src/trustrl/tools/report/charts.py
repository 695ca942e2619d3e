"""Charts over the steps of runs.

A line skips steps without the metric and breaks at steps where it is not finite (null in the file).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trustrl.core.metrics import METRICS
from trustrl.runner.run_verdict import rollouts, windows
from trustrl.tools.report.region_descriptions import number, statistic_of, unit_of
from trustrl.tools.report.run_folders import Run, updates_per_batch

MAX_POINTS = 1000
"""Maximum points of a line. Longer lines keep the minimum and maximum of each interval of steps."""

SMOOTHED_FROM, WINDOWS = 250, 50
"""Lines with this many points get a running mean over a fiftieth of them, which smooths the updates of a batch."""

Point = tuple[int, float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """Line of one run in one chart."""

    run: int
    """Index among the runs of the report."""

    points: list[Point]
    mean: list[Point]
    """Running mean; empty for short lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One quantity over the steps."""

    key: str
    title: str
    unit: str
    about: str = ""
    """Description and healthy range."""

    percent: bool = False
    bound: float | None = None
    """Threshold of the region, if all lines share it."""

    lines: list[Line]

    def to_dict(self) -> dict[str, Any]:
        """Returns the chart as data for the page's script."""
        lines = [{"run": line.run, "points": line.points, "mean": line.mean} for line in self.lines]
        own = {name: getattr(self, name) for name in self.__slots__ if name != "lines"}
        return {**own, "lines": lines}


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Returns every chart that at least one run has data for."""
    measured = [run.rows for run in runs]
    found = [
        Chart(
            key="reward", title="Reward", unit="mean per rollout",
            about="One point per rollout, at its first update.",
            lines=_lines([rollouts(run.rows, updates_per_batch(run.recipe)) for run in runs], _reader("reward")),
        ),
        Chart(
            key="accuracy", title="Held-out accuracy", unit="share of problems", about="Step 0 is before training.",
            percent=True, lines=_lines([run.evaluations for run in runs], _reader("accuracy")),
        ),
        Chart(
            key="acted", title="Tokens masked or projected", unit="share of tokens with A ≠ 0 (projected: of all)",
            about=_healthy("masked_share"), percent=True, lines=_lines(measured, _acted),
        ),
        *_divergences(runs),
        Chart(
            key="kl_k3", title="KL to the anchor", unit="nats", lines=_lines(measured, _reader("trustrl/kl_k3")),
            about=f"The k3 estimate, comparable between regions. {_healthy('kl_k3')}",
        ),
        Chart(
            key="entropy", title="Entropy", unit="nats", lines=_lines(measured, _reader("trustrl/entropy", "entropy")),
            about="Entropy of the policy, mean over tokens. Near 0, the policy no longer explores.",
        ),
        Chart(
            key="grad_norm", title="Gradient norm", unit="L2", about="Before clipping.",
            lines=_lines(measured, _reader("grad_norm")),
        ),
        Chart(
            key="mismatch", title="Sampler–trainer mismatch", unit="nats",
            about=f"Mean |log π' − log μ|. {_healthy('mismatch_abs_mean')}",
            lines=_lines(measured, _reader("trustrl/mismatch_abs_mean")),
        ),
    ]  # fmt: skip
    return [chart for chart in found if chart.lines]


def _healthy(name: str) -> str:
    return f"Healthy: {next(metric.healthy for metric in METRICS if metric.name == name)}."


def _divergences(runs: Sequence[Run]) -> list[Chart]:
    """Returns charts of the mean and the 99% quantile of D, separate for each unit."""
    found = []
    for unit in dict.fromkeys(unit for run in runs if (unit := unit_of(run.region)) is not None):
        here = [run.rows if unit_of(run.region) == unit else [] for run in runs]
        statistics = [one for run in runs if unit_of(run.region) == unit and (one := statistic_of(run.region))]
        bounds = {bound for one in statistics for bound in one.bounds}
        bound = bounds.pop() if len(bounds) == 1 and math.inf not in bounds else None
        edge = "" if bound is None else f" The region acts above {number(bound)}."
        about = f"{', '.join(dict.fromkeys(one.kind for one in statistics))}; lower end of the interval.{edge}"
        for name, title in (("divergence_mean", "Divergence, mean"), ("divergence_p99", "Divergence, 99% quantile")):
            lines = _lines(here, _reader(f"trustrl/{name}"))
            key = f"{name}-{unit.split()[0]}"
            found.append(Chart(key=key, title=title, unit=unit, about=about, bound=bound, lines=lines))
    return found


Reader = Callable[[Mapping[str, Any]], tuple[bool, float | None]]
"""Returns (whether the row has the metric, its value or None if it is not finite)."""


def _reader(*names: str) -> Reader:
    def read(row: Mapping[str, Any]) -> tuple[bool, float | None]:
        for name in names:
            if name in row:
                return True, _finite(row[name])
        return False, None

    return read


def _acted(row: Mapping[str, Any]) -> tuple[bool, float | None]:
    names = [name for name in ("trustrl/masked_share", "trustrl/projected_share") if name in row]
    values = [_finite(row[name]) for name in names]
    return bool(names), None if None in values else sum(value for value in values if value is not None)


def _finite(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _lines(rows_of_runs: Sequence[Sequence[Mapping[str, Any]]], read: Reader) -> list[Line]:
    found = ((at, points_of(rows, read)) for at, rows in enumerate(rows_of_runs))
    return [Line(at, thinned(points), thinned(running_mean(points))) for at, points in found if points]


def points_of(rows: Sequence[Mapping[str, Any]], read: Reader) -> list[Point]:
    """Returns (step, value) of every row that has the metric."""
    found = ((int(row["step"]), *read(row)) for row in rows)
    return [(step, value) for step, there, value in found if there]


def running_mean(points: Sequence[Point]) -> list[Point]:
    """Returns the running mean over a fiftieth of the points, or an empty list for short lines."""
    finite = [(step, value) for step, value in points if value is not None]
    if len(finite) < SMOOTHED_FROM:
        return []
    means = windows([value for _, value in finite], max(2, len(finite) // WINDOWS))
    return list(zip((step for step, _ in finite), means, strict=True))


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Reduces a line to at most `most` points: the minimum and maximum of each interval, and a gap if it has one.

    Example:
        >>> thinned([(step, float(step == 5)) for step in range(8)], 4)
        [(0, 0.0), (5, 1.0)]
    """
    if len(points) <= most:
        return list(points)
    width = math.ceil(len(points) / max(1, most // 3))
    kept: list[Point] = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        finite = [point for point in stretch if point[1] is not None]
        ends = [min(finite, key=_value), max(reversed(finite), key=_value)] if finite else []
        gap = [point for point in stretch if point[1] is None][:1]
        kept += sorted({*ends, *gap}, key=lambda point: point[0])
    return kept


def _value(point: Point) -> float:
    return 0.0 if point[1] is None else point[1]

"""Charts over the steps of runs.

A line skips steps without the metric and breaks at steps where it is not finite (null in the file).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trustrl.core.metrics import Metric
from trustrl.regions.words import number
from trustrl.runs.run_verdict import rollouts
from trustrl.tools.report.metric_explanations import Band, Explanation, band_of, explained
from trustrl.tools.report.region_descriptions import statistic_of, unit_of
from trustrl.tools.report.reported_runs import ReportedRun, updates_per_row

MAX_POINTS = 1000
"""Maximum points of a line. Longer lines keep the minimum and maximum of each interval of steps, and its mean."""

MAX_OTHERS, OTHER_POINTS = 100, 300
"""Maximum charts of metrics that the report does not know by name, and maximum points of their lines."""

Point = tuple[int, float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """Line of one run in one chart."""

    run: int
    """Index among the runs of the report."""

    points: list[Point]
    means: list[Point]
    """Mean of each interval of steps if the line was thinned, otherwise empty. Smoothing reads these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One quantity over the steps."""

    key: str
    title: str
    unit: str
    about: str = ""
    percent: bool = False
    bound: float | None = None
    """Threshold of the region, if all lines share it."""

    band: Band | None = None
    """Healthy range, if all lines share it."""

    explanation: Metric | Explanation | None = None
    other: bool = False
    """True for a metric that the report does not know by name. The page folds these charts."""

    lines: list[Line]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Metric:
    """Metric with a separate chart, read under the first of its names that a row has."""

    key: str
    names: tuple[str, ...]
    title: str
    unit: str
    about: str = ""
    percent: bool = False


_FIRST = (
    _Metric(key="kl_k3", names=("trustrl/kl_k3",), title="KL to the anchor", unit="nats",
            about="The k3 estimate, comparable between regions."),
    _Metric(key="entropy", names=("trustrl/entropy", "entropy"), title="Entropy", unit="nats",
            about="Mean over tokens. Near 0, the policy no longer explores."),
    _Metric(key="grad_norm", names=("grad_norm",), title="Gradient norm", unit="L2", about="Before clipping."),
    _Metric(key="mismatch", names=("trustrl/mismatch_abs_mean",), title="Sampler–trainer mismatch", unit="nats",
            about="Mean |log π' − log μ|."),
    _Metric(key="clipped", names=("clip_share",), title="Tokens clipped by the engine", unit="share of tokens",
            percent=True),
    _Metric(key="length", names=("completion_length",), title="Completion length", unit="tokens", about="Mean."),
    _Metric(key="truncated", names=("truncated_share",), title="Truncated completions", unit="share", percent=True),
    _Metric(key="reward_std", names=("reward_std",), title="Reward spread", unit="standard deviation in a group"),
    _Metric(key="zero_std", names=("frac_reward_zero_std",), title="Groups of equal rewards", unit="share",
            percent=True),
)  # fmt: skip
_ACTED = ("trustrl/masked_share", "trustrl/projected_share")


def charts(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Returns every chart that at least one run has data for, those with a name of their own first."""
    measured = [run.run.rows for run in runs]
    rewards = [rollouts(run.run.rows, updates_per_row(run.run)) for run in runs]
    main_charts = [
        Chart(
            key="reward", title="Reward", unit="mean per rollout", explanation=explained("reward"),
            about="One point per rollout, at its first update.", lines=_lines(rewards, _reader("reward")),
        ),
        Chart(
            key="accuracy", title="Held-out accuracy", unit="share of problems", about="Step 0 is before training.",
            percent=True, lines=_lines([run.run.evaluations for run in runs], _reader("accuracy")),
            explanation=explained("accuracy"),
        ),
        Chart(
            key="acted", title="Tokens masked or projected", unit="share of tokens with A ≠ 0",
            about="Projected: of all tokens.", percent=True, lines=_lines(measured, _acted),
            band=_band("masked_share", runs), explanation=explained("trustrl/masked_share"),
        ),
        *_divergences(runs),
        *(_chart(metric, runs) for metric in _FIRST),
    ]  # fmt: skip
    shown = {"step", "reward", *_ACTED, "trustrl/divergence_mean", "trustrl/divergence_p99"}
    shown |= {name for metric in _FIRST for name in metric.names}
    return [chart for chart in (*main_charts, *_others(runs, shown)) if chart.lines]


def _chart(metric: _Metric, runs: Sequence[ReportedRun]) -> Chart:
    logged = {name for run in runs for row in run.run.rows for name in row}
    name = next((candidate for candidate in metric.names if candidate in logged), metric.names[0])
    return Chart(
        key=metric.key, title=metric.title, unit=metric.unit, about=metric.about, percent=metric.percent,
        band=_band(name.removeprefix("trustrl/"), runs), explanation=explained(name),
        lines=_lines([run.run.rows for run in runs], _reader(*metric.names)),
    )  # fmt: skip


def _band(name: str, runs: Sequence[ReportedRun]) -> Band | None:
    bands = {band_of(name, run.run.settings) for run in runs}
    return bands.pop() if len(bands) == 1 else None


def _divergences(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Returns charts of the mean and the 99% quantile of D, separate for each unit."""
    divergences = []
    for unit in dict.fromkeys(unit for run in runs if (unit := unit_of(run.region)) is not None):
        here = [run.run.rows if unit_of(run.region) == unit else [] for run in runs]
        statistics = [
            statistic for run in runs if unit_of(run.region) == unit and (statistic := statistic_of(run.region))
        ]
        bounds = {bound for statistic in statistics for bound in statistic.bounds}
        bound = bounds.pop() if len(bounds) == 1 and math.inf not in bounds else None
        edge = "" if bound is None else f" The region acts above {number(bound)}."
        about = (
            f"{', '.join(dict.fromkeys(statistic.kind for statistic in statistics))}; lower end of the interval.{edge}"
        )
        for name, title in (("divergence_mean", "Divergence, mean"), ("divergence_p99", "Divergence, 99% quantile")):
            lines = _lines(here, _reader(f"trustrl/{name}"))
            key, why = f"{name}-{unit.split()[0]}", explained(f"trustrl/{name}")
            divergences.append(
                Chart(key=key, title=title, unit=unit, about=about, bound=bound, explanation=why, lines=lines)
            )
    return divergences


def _others(runs: Sequence[ReportedRun], shown: set[str]) -> list[Chart]:
    """Returns one chart for each other metric in the rows, under the name it has there."""
    names = sorted({name for run in runs for row in run.run.rows for name in row} - shown)
    rows = [run.run.rows for run in runs]
    return [
        Chart(
            key=f"other-{index}", title=name, unit=why.unit if why else "", explanation=why, other=True,
            band=_band(name.removeprefix("trustrl/"), runs), percent=why is not None and why.unit == "share",
            lines=_lines(rows, _reader(name), OTHER_POINTS),
        )
        for index, name in enumerate(names[:MAX_OTHERS])
        for why in (explained(name),)
    ]  # fmt: skip


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
    names = [name for name in _ACTED if name in row]
    values = [_finite(row[name]) for name in names]
    return bool(names), None if None in values else sum(value for value in values if value is not None)


def _finite(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _lines(rows_of_runs: Sequence[Sequence[Mapping[str, Any]]], read: Reader, most: int = MAX_POINTS) -> list[Line]:
    series = ((index, points_of(rows, read)) for index, rows in enumerate(rows_of_runs))
    return [Line(index, thinned(points, most), interval_means(points, most)) for index, points in series if points]


def points_of(rows: Sequence[Mapping[str, Any]], read: Reader) -> list[Point]:
    """Returns (step, value) of every row that has the metric."""
    readings = ((int(row["step"]), *read(row)) for row in rows)
    return [(step, value) for step, there, value in readings if there]


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Reduces a line to at most `most` points: the minimum and maximum of each interval, and a gap if it has one.

    Example:
        >>> thinned([(step, float(step == 5)) for step in range(8)], 4)
        [(0, 0.0), (5, 1.0)]
    """
    if len(points) <= most:
        return list(points)
    kept: list[Point] = []
    for stretch in _intervals(points, most):
        finite = [point for point in stretch if point[1] is not None]
        ends = [min(finite, key=_value), max(reversed(finite), key=_value)] if finite else []
        gap = [point for point in stretch if point[1] is None][:1]
        kept += sorted({*ends, *gap}, key=lambda point: point[0])
    return kept


def interval_means(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Returns the mean of each interval of a line that `thinned` reduces, at its last step, or an empty list.

    Example:
        >>> interval_means([(step, float(step)) for step in range(8)], 6)
        [(3, 1.5), (7, 5.5)]
    """
    if len(points) <= most:
        return []
    means: list[Point] = []
    for stretch in _intervals(points, most):
        finite = [value for _, value in stretch if value is not None]
        if finite:
            means.append((stretch[-1][0], sum(finite) / len(finite)))
    return means


def _intervals(points: Sequence[Point], most: int) -> list[Sequence[Point]]:
    width = math.ceil(len(points) / max(1, most // 3))
    return [points[start : start + width] for start in range(0, len(points), width)]


def _value(point: Point) -> float:
    return 0.0 if point[1] is None else point[1]

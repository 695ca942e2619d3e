"""Charts over the steps of runs, with the explanation and the healthy band of each.

Explanations come from the metric dictionary, or are written here for the metrics of trainers.

A line skips steps without the metric and breaks at steps where it is not finite (null in the file).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from trustrl.core.metrics import METRICS, Metric
from trustrl.regions.recommended import healthy_masked_share
from trustrl.regions.words import number
from trustrl.runs.run import RunSettings
from trustrl.runs.run_verdict import rollouts
from trustrl.tools.report.reported_runs import ReportedRun, statistic_of, unit_of, updates_per_row

MAX_POINTS = 1000
"""Maximum points of a line. Longer lines keep the minimum and maximum of each interval of steps, and its mean."""

MAX_OTHERS, OTHER_POINTS = 100, 300
"""Maximum charts of metrics that the report does not know by name, and maximum points of their lines."""

Point = tuple[int, float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Definition of a metric that trainers log, with the fields of the metric dictionary."""

    formula: str
    unit: str
    healthy: str
    action: str
    direction: str = ""
    elsewhere: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of the nearest metric of each engine."""


def explained(name: str) -> Metric | Explanation | None:
    """Returns the explanation of a logged metric, or None if it has none.

    Example:
        >>> explained("trustrl/kl_k3").unit
        'nats'
    """
    ours = name.startswith("trustrl/") and _DICTIONARY.get(name.removeprefix("trustrl/"))
    return ours or _LOGGED_BY_TRAINERS.get(name)


_DICTIONARY = {metric.name: metric for metric in METRICS}
_TASK = "none: depends on the task"
_LOGGED_BY_TRAINERS = {
    "reward": Explanation(
        formula="mean reward of a rollout's completions", unit="the task's", healthy="rises, then levels off",
        direction="a fall is bad",
        action="A fall while the divergence or the mismatch rises points to the update; run `trustrl explain`. A rise "
        "while held-out accuracy falls points to the reward.",
        elsewhere={"trl": "reward", "verl": "critic/score/mean"},
    ),
    "accuracy": Explanation(
        formula="share of held-out problems solved; step 0 is before training", unit="share", healthy="rises",
        direction="a fall is bad",
        action="A last value below the first by more than two standard errors counts as a collapse.",
        elsewhere={"verl": "val-core/.../acc"},
    ),
    "grad_norm": Explanation(
        formula="L2 norm of the gradient before clipping", unit="L2", healthy=_TASK, direction="a sudden rise is bad",
        action="A spike that coincides with a rising masked share points to a few tokens with a large ratio. Read them "
        "among the completions, sorted by |log π/μ|.",
        elsewhere={"trl": "grad_norm", "verl": "actor/grad_norm"},
    ),
    "entropy": Explanation(
        formula="mean entropy of the policy over tokens", unit="nats", healthy=_TASK,
        direction="a fast change in either direction is bad",
        action="If it falls to 0, the policy no longer explores. If it keeps rising, probability mass moves to "
        "unlikely tokens.",
        elsewhere={"trl": "entropy", "verl": "actor/entropy"},
    ),
    "completion_length": Explanation(
        formula="mean number of tokens in a completion", unit="tokens", healthy=_TASK, direction="a drift is a hint",
        action="A rise without a rise in reward is padding. A fall to a few tokens is a collapse of the format.",
        elsewhere={"trl": "completions/mean_length", "verl": "response_length/mean"},
    ),
    "truncated_share": Explanation(
        formula="completions that reached the length limit / completions", unit="share", healthy="below a few percent",
        direction="high is bad", action="Raise the limit, or leave truncated completions out of the loss.",
        elsewhere={"trl": "completions/clipped_ratio", "verl": "response_length/clip_ratio"},
    ),
    "reward_std": Explanation(
        formula="standard deviation of the rewards inside a group, mean over groups", unit="the task's", healthy=_TASK,
        direction="near 0 is bad", action="Groups of equal rewards have no gradient. Use harder or easier problems.",
        elsewhere={"trl": "reward_std"},
    ),
    "frac_reward_zero_std": Explanation(
        formula="groups whose rewards are all equal / groups", unit="share", healthy=_TASK, direction="high is bad",
        action="These groups have no gradient. Use harder or easier problems, or more completions for each prompt.",
        elsewhere={"trl": "frac_reward_zero_std"},
    ),
    "clip_share": Explanation(
        formula="tokens whose ratio the engine's loss clips / tokens", unit="share", healthy="below a few percent",
        direction="high is bad", action="Lower the learning rate or the number of updates per batch.",
        elsewhere={"trl": "clip_ratio/region_mean", "verl": "actor/pg_clipfrac"},
    ),
    "loss": Explanation(
        formula="the trainer's loss", unit="none", healthy=_TASK, direction="not finite is bad",
        action="The value of a policy-gradient loss means little. A value that is not finite ends learning.",
    ),
    "learning_rate": Explanation(
        formula="learning rate of the step", unit="none", healthy=_TASK,
        action="Compare its schedule with the other curves.",
    ),
}  # fmt: skip


HALF = frozenset({"bfloat16", "bf16", "float16", "fp16", "half"})
FULL = frozenset({"float32", "fp32", "float"})


@dataclass(frozen=True, slots=True)
class Band:
    """Range of healthy values. An end that is infinite is open."""

    low: float
    high: float
    source: str
    """The range in the words of the metric dictionary."""


_ENDS = {
    "kl_k2": (0.0, 0.01),
    "kl_k3": (0.0, 0.01),
    "chi_square": (-math.inf, 0.1),
    "ratio_mean": (0.98, 1.02),
    "effective_sample_share": (0.9, 1.0),
    "mismatch_ratio_mean": (0.99, 1.01),
    "correction_mean": (0.98, 1.02),
    "correction_zero_share": (0.0, 0.01),
    "dropped_share": (0.0, 0.0),
    "stale_share": (0.0, 0.05),
    "projected_share": (0.0, 0.05),
}
_BY_DTYPE = {
    "mismatch_abs_mean": {"full": (0.0, 1e-5), "half": (0.0, 4e-2)},
    "mismatch_max": {"half": (-math.inf, 0.3)},
}


def band_of(name: str, settings: RunSettings) -> Band | None:
    """Returns the band of a metric by its name without `trustrl/`, or None if it has no numeric range.

    The sampler–trainer mismatch depends on the dtypes. It has no band if the run's files do not contain them.
    """
    if name == "masked_share":
        return Band(0.0, healthy_masked_share(settings.updates_per_batch), _DICTIONARY[name].healthy)
    ends = _ENDS.get(name) or _BY_DTYPE.get(name, {}).get(_precision(settings))
    if ends is None:
        return None
    return Band(*ends, _DICTIONARY[name].healthy)


def _precision(settings: RunSettings) -> str:
    dtypes = {str(dtype).removeprefix("torch.") for dtype in (settings.sampler_dtype, settings.trainer_dtype) if dtype}
    if dtypes & HALF:
        return "half"
    return "full" if dtypes and dtypes <= FULL else "unknown"


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
    metric: str = ""
    """Name of the metric in the rows. Empty if it is in none."""

    other: bool = False
    """True for a metric that the report does not know by name. The page folds these charts."""

    lines: list[Line] = field(default_factory=list["Line"])


_FIRST: tuple[tuple[Chart, tuple[str, ...]], ...] = (
    (Chart(key="kl_k3", title="KL to the anchor", unit="nats", about="The k3 estimate, comparable between regions."),
     ("trustrl/kl_k3",)),
    (Chart(key="entropy", title="Entropy", unit="nats",
           about="Mean over tokens. Near 0, the policy no longer explores."),
     ("trustrl/entropy", "entropy")),
    (Chart(key="grad_norm", title="Gradient norm", unit="L2", about="Before clipping."), ("grad_norm",)),
    (Chart(key="mismatch", title="Sampler–trainer mismatch", unit="nats", about="Mean |log π' − log μ|."),
     ("trustrl/mismatch_abs_mean",)),
    (Chart(key="clipped", title="Tokens clipped by the engine", unit="share of tokens", percent=True), ("clip_share",)),
    (Chart(key="length", title="Completion length", unit="tokens", about="Mean."), ("completion_length",)),
    (Chart(key="truncated", title="Truncated completions", unit="share", percent=True), ("truncated_share",)),
    (Chart(key="reward_std", title="Reward spread", unit="standard deviation in a group"), ("reward_std",)),
    (Chart(key="zero_std", title="Groups of equal rewards", unit="share", percent=True), ("frac_reward_zero_std",)),
)  # fmt: skip
"""Charts of single metrics, and the names of each. A row is read under the first of them that it has."""

_ACTED = ("trustrl/masked_share", "trustrl/projected_share")


def charts(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Returns every chart that at least one run has data for, those with a name of their own first."""
    measured = [run.run.rows for run in runs]
    rewards = [rollouts(run.run.rows, updates_per_row(run.run)) for run in runs]
    main_charts = [
        Chart(
            key="reward", title="Reward", unit="mean per rollout", explanation=explained("reward"),
            about="One point per rollout, at its first update.", metric="reward", lines=_lines(rewards, "reward"),
        ),
        Chart(
            key="accuracy", title="Held-out accuracy", unit="share of problems", about="Step 0 is before training.",
            percent=True, lines=_lines([run.run.evaluations for run in runs], "accuracy"),
            explanation=explained("accuracy"),
        ),
        Chart(
            key="acted", title="Tokens masked or projected", unit="share of tokens with A ≠ 0",
            about="Projected: of all tokens.", percent=True, lines=_lines(measured, *_ACTED, add=True),
            metric=_ACTED[0], band=_band("masked_share", runs), explanation=explained("trustrl/masked_share"),
        ),
        *_divergences(runs),
        *(_chart(chart, names, runs) for chart, names in _FIRST),
    ]  # fmt: skip
    shown = {"step", "reward", *_ACTED, "trustrl/divergence_mean", "trustrl/divergence_p99"}
    shown |= {name for _, names in _FIRST for name in names}
    return [chart for chart in (*main_charts, *_others(runs, shown)) if chart.lines]


def _chart(chart: Chart, names: Sequence[str], runs: Sequence[ReportedRun]) -> Chart:
    logged = {name for run in runs for row in run.run.rows for name in row}
    name = next((candidate for candidate in names if candidate in logged), names[0])
    lines = _lines([run.run.rows for run in runs], *names)
    return replace(
        chart, band=_band(name.removeprefix("trustrl/"), runs), explanation=explained(name), metric=name, lines=lines
    )


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
            lines = _lines(here, f"trustrl/{name}")
            key, why = f"{name}-{unit.split()[0]}", explained(f"trustrl/{name}")
            divergences.append(
                Chart(
                    key=key,
                    title=title,
                    unit=unit,
                    about=about,
                    bound=bound,
                    explanation=why,
                    lines=lines,
                    metric=f"trustrl/{name}",
                )
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
            lines=_lines(rows, name, most=OTHER_POINTS),
        )
        for index, name in enumerate(names[:MAX_OTHERS])
        for why in (explained(name),)
    ]  # fmt: skip


def _finite(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _lines(
    rows_of_runs: Sequence[Sequence[Mapping[str, Any]]], *names: str, add: bool = False, most: int = MAX_POINTS
) -> list[Line]:
    """Returns the line of each run that has the metric: the first of these names that a row has, or their sum."""
    lines = []
    for index, rows in enumerate(rows_of_runs):
        points: list[Point] = []
        for row in rows:
            values = [_finite(row[name]) for name in names if name in row]
            if values:
                finite = [value for value in values if value is not None]
                total = sum(finite) if len(finite) == len(values) else None
                points.append((int(row["step"]), total if add else values[0]))
        if points:
            lines.append(Line(index, thinned(points, most), interval_means(points, most)))
    return lines


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
        finite = [(step, value) for step, value in stretch if value is not None]
        ends = [min(finite, key=itemgetter(1)), max(reversed(finite), key=itemgetter(1))] if finite else []
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

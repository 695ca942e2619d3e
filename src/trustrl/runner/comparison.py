"""Results of a comparison: mean, standard deviation and confidence interval of each region, and the failures."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trustrl.files import finite
from trustrl.runner.grid import Cell, Failure
from trustrl.runs.run_directory import StoredRun, checked_result, checked_rows
from trustrl.runs.run_verdict import COLLAPSE, rewards_of, rollouts, steps_to, summary

INTERVAL = "95% confidence interval of the mean: Student's t over seeds"
CURVES = ("trustrl/masked_share", "trustrl/projected_share")
T_975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
    2.0452, 2.0423,
)  # fmt: skip
"""The 0.975 quantile of Student's t for 1 to 30 degrees of freedom."""


def t_975(freedom: int) -> float:
    """Returns the 0.975 quantile of Student's t."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Returns mean, standard deviation and the mean's confidence interval. One value has only a mean."""
    if not values:
        return {"mean": None, "sd": None, "low": None, "high": None, "n": 0}
    mean = statistics.fmean(values)
    if len(values) == 1:
        return {"mean": mean, "sd": None, "low": None, "high": None, "n": 1}
    sd = statistics.stdev(values)
    half = t_975(len(values) - 1) * sd / math.sqrt(len(values))
    return {"mean": mean, "sd": sd, "low": mean - half, "high": mean + half, "n": len(values)}


def table(cells: Sequence[Cell], failures: Sequence[Failure], threshold: float) -> dict[str, Any]:
    """Returns all results of the comparison, including curves. Figures are drawn from this table alone."""
    runs = [_run(cell, threshold) for cell in cells]
    names = dict.fromkeys(cell.region for cell in cells)
    regions = {region: _row([run for run in runs if run["region"] == region], failures) for region in names}
    return finite(
        {
            "interval": INTERVAL,
            "collapse": COLLAPSE,
            "threshold": threshold,
            "threshold_rule": "first step at which the mean reward over a tenth of the run's steps reaches it",
            "regions": regions,
            "failures": list(map(asdict, failures)),
            "runs": runs,
        }
    )


def _run(cell: Cell, threshold: float) -> dict[str, Any]:
    run = StoredRun(cell.folder)
    rows = checked_rows(run)
    updates = cell.recipe.schedule.updates_per_batch
    result = {}
    if run.finished:  # recomputed, because an older version may have used other rules
        result = checked_result(run) | summary(rows, checked_rows(run, "evaluation"), updates)
    curves = {name: [row.get(name) for row in rows] for name in CURVES if any(name in row for row in rows)}
    rewarded = [row for row in rollouts(rows, updates) if row["reward"] is not None]
    return {
        "region": cell.region,
        "seed": cell.seed,
        "finished": run.finished,
        "result": result,
        "steps_to_threshold": steps_to(rows, threshold) if rewards_of(rows) else None,
        "step": [row["step"] for row in rows],
        "curves": curves,
        "rollouts": {"step": [row["step"] for row in rewarded], "reward": rewards_of(rewarded)},
    }


def _row(runs: Sequence[Mapping[str, Any]], failures: Sequence[Failure]) -> dict[str, Any]:
    """Summarizes one region over its finished runs, and counts the unfinished and failed ones."""
    done = [run for run in runs if run["finished"]]
    region = runs[0]["region"]

    def over(name: str) -> dict[str, Any]:
        return spread([run["result"][name] for run in done if run["result"][name] is not None])

    reached = [run["steps_to_threshold"] for run in done if run["steps_to_threshold"] is not None]
    return {
        "runs": len(runs),
        "finished": len(done),
        "failed": sum(failure.region == region for failure in failures),
        "accuracy_before": over("accuracy_before"),
        "accuracy_after": over("accuracy_after"),
        "reward_last": over("reward_last"),
        "collapse_rate": sum(run["result"]["collapsed"] for run in done) / len(done) if done else None,
        "reached_threshold": len(reached),
        "steps_to_threshold": spread(reached),
        "masked_share": over("masked_share"),
        "projected_share": over("projected_share"),
    }


def markdown(results: Mapping[str, Any]) -> str:
    """Formats the table as Markdown."""
    threshold = results["threshold"]
    lines = [
        f"| region | finished | accuracy before | accuracy after | sd | 95% interval | collapsed | "
        f"steps to reward {threshold:g} | masked or projected |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for region, row in results["regions"].items():
        after, steps = row["accuracy_after"], row["steps_to_threshold"]
        interval = "–" if after["low"] is None else f"{after['low']:.3f} to {after['high']:.3f}"
        acted = (row["masked_share"]["mean"] or 0.0) + (row["projected_share"]["mean"] or 0.0)
        failed = f", {row['failed']} failed" if row["failed"] else ""
        lines.append(
            f"| `{region}` | {row['finished']} of {row['runs']}{failed} | {_number(row['accuracy_before']['mean'])} | "
            f"{_number(after['mean'])} | {_number(after['sd'])} | {interval} | {_share(row['collapse_rate'])} | "
            f"{_number(steps['mean'], 0)} ({row['reached_threshold']} of {row['finished']}) | {_share(acted)} |"
        )
    notes = [results["interval"], results["collapse"], f"Steps to a reward: {results['threshold_rule']}"]
    lines += ["", *(f"{note.rstrip('.')}." for note in notes)]
    for failure in results["failures"]:
        lines += [
            "",
            f"Failed: `{failure['region']}`, seed {failure['seed']}, code {failure['code']}.",
            "",
            "```",
            failure["said"],
            "```",
        ]
    return "\n".join(lines) + "\n"


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"

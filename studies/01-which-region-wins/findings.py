"""Statistics of the collected runs: one region in a setting, and two regions against each other."""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from collect import RUNS, STEPS
from scipy.stats import t as student_t

from trustrl.runner.comparison import spread
from trustrl.runs.run_verdict import collapsed, rollouts, steps_to

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from holm import LEVEL, holm

THRESHOLD = 0.6
"""Reward threshold; the first step that reaches it measures speed."""

UPDATES = {"mismatch": 1, "stale-4": 4}
"""Number of updates on each rollout in the settings where it is not 16."""

EVALUATED = 500
"""Held-out problems in each evaluation (`evaluation.count` of the recipes)."""


@cache
def runs() -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """Returns each run's result by (setting, arm) and seed, with the numbers that follow from its steps."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    curves = steps()
    for line in RUNS.read_text().splitlines():
        run = json.loads(line)
        rows = curves[run["setting"], run["arm"]][run["seed"]]
        run["mean_reward"] = sum(row["reward"] for row in rows) / len(rows)
        run["steps_to"] = steps_to(rows, THRESHOLD)
        run["collapsed"] = collapsed(rows, evaluations(run), updates_per_batch(run["setting"]))
        found[run["setting"], run["arm"]][run["seed"]] = run
    return found


def updates_per_batch(setting: str) -> int:
    """Returns the number of updates on each rollout of a setting."""
    return UPDATES.get(setting, 16)


def evaluations(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a run's two evaluations, as its folder stores them."""
    steps_at = {"before": 0, "after": run["steps"]}
    return [{"step": step, "accuracy": run[f"accuracy_{when}"], "count": EVALUATED} for when, step in steps_at.items()]


def rewards_of_rollouts(setting: str, arm: str) -> dict[int, list[tuple[int, float]]]:
    """Returns (updates made before it, mean reward) of each rollout, by seed."""
    made = steps().get((setting, arm), {})
    return {
        seed: [(row["step"] - 1, row["reward"]) for row in rollouts(rows, updates_per_batch(setting))]
        for seed, rows in made.items()
    }


@cache
def steps() -> dict[tuple[str, str], dict[int, list[dict[str, Any]]]]:
    """Returns each run's steps, by (setting, arm) and seed."""
    found: dict[tuple[str, str], dict[int, list]] = defaultdict(lambda: defaultdict(list))
    for row in pq.read_table(STEPS).to_pylist():
        found[row["setting"], row["arm"]][row["seed"]].append(row)
    return found


def over_seeds(setting: str, arm: str, name: str) -> dict[str, Any]:
    """Returns mean, standard deviation and interval of one number over seeds."""
    return spread([run[name] for run in runs().get((setting, arm), {}).values() if run[name] is not None])


@dataclass(frozen=True, slots=True)
class Difference:
    """Paired difference of two arms. The same seed draws the same problems and the same first batch."""

    mean: float
    low: float
    high: float
    """Ends of the 95% interval of this comparison alone."""

    seeds: int
    p: float
    """p of the paired t test, for this comparison alone."""

    holm: float
    """The same p, adjusted for all comparisons on the page."""

    @property
    def sign(self) -> int:
        """1 or -1 if the adjusted p is below 5%, else 0."""
        return 0 if self.holm >= LEVEL else 1 if self.mean > 0 else -1

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


Key = tuple[str, str, str]
"""(setting, arm, other arm)."""


def by_seed(setting: str, arm: str, other: str, name: str) -> list[float]:
    """Returns the differences of the seeds that both arms have."""
    first, second = runs().get((setting, arm), {}), runs().get((setting, other), {})
    return [first[seed][name] - second[seed][name] for seed in sorted(first.keys() & second.keys())]


def p_value(values: Sequence[float]) -> float:
    """Returns the two-sided p of the one-sample t test against 0."""
    found = spread(values)
    if not found["sd"]:
        return float(found["mean"] == 0)
    return float(2 * student_t.sf(abs(found["mean"]) / (found["sd"] / math.sqrt(len(values))), len(values) - 1))


def family(
    settings: Sequence[str], pairs: Sequence[tuple[str, str]], name: str = "accuracy_after"
) -> dict[Key, Difference]:
    """Returns a page's comparisons, adjusted together. Skips those with fewer than two common seeds."""
    made = {(setting, *pair): by_seed(setting, *pair, name) for setting in settings for pair in pairs}
    made = {key: values for key, values in made.items() if len(values) > 1}
    p_values = [p_value(values) for values in made.values()]
    return {
        key: Difference(found["mean"], found["low"], found["high"], found["n"], p, adjusted)
        for key, found, p, adjusted in zip(made, map(spread, made.values()), p_values, holm(p_values), strict=True)
    }


def rows(settings: Sequence[str], arms: Sequence[str]) -> list[str]:
    """Returns a Markdown table of arms in settings: accuracy, collapse, speed and the region's action."""
    lines = [
        f"| setting | region | seeds | accuracy before | after [95 %] | sd | mean reward | collapsed | steps to reward "
        f"{THRESHOLD:g} | masked or projected |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setting in settings:
        for arm in arms:
            made = list(runs().get((setting, arm), {}).values())
            if not made:
                lines.append(f"| {setting} | `{arm}` | 0 | not run | | | | | | |")
                continue
            after, reached = over_seeds(setting, arm, "accuracy_after"), [r["steps_to"] for r in made if r["steps_to"]]
            acted = sum((r["masked_share"] or 0.0) + (r["projected_share"] or 0.0) for r in made) / len(made)
            speed = f"{sum(reached) / len(reached):.0f} ({len(reached)} of {len(made)})" if reached else "none"
            interval = "" if after["low"] is None else f" [{after['low']:.3f}, {after['high']:.3f}]"
            lines.append(
                f"| {setting} | `{arm}` | {len(made)} | {over_seeds(setting, arm, 'accuracy_before')['mean']:.3f} | "
                f"{after['mean']:.3f}{interval} | {after['sd'] or 0:.3f} | "
                f"{over_seeds(setting, arm, 'mean_reward')['mean']:.3f} | "
                f"{sum(r['collapsed'] for r in made)} of {len(made)} | {speed} | {acted:.1%} |"
            )
    return lines


def differences(settings: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Returns a Markdown table of a page's paired differences in the final accuracy and in the mean reward."""
    lines = [
        "| setting | difference | seeds | final accuracy [95 %] | p, Holm | mean reward [95 %] | p, Holm |",
        "|---|---|---|---|---|---|---|",
    ]
    final, reward = family(settings, pairs), family(settings, pairs, "mean_reward")
    for (setting, arm, other), one in final.items():
        other_one = reward[setting, arm, other]
        lines.append(
            f"| {setting} | `{arm}` − `{other}` | {one.seeds} | {one} | {one.holm:.3f} | {other_one} | "
            f"{other_one.holm:.3f} |"
        )
    return lines

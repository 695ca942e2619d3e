"""What the collected runs say of a region in a setting, and of two regions against each other."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow.parquet as pq
from collect import RUNS, STEPS

from trustrl.runner.comparison import spread
from trustrl.runner.summary import steps_to

THRESHOLD = 0.6
"""The reward whose first step is the measure of speed."""


@cache
def runs() -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """Each run's result by (setting, arm) and seed, with its mean reward and the steps to `THRESHOLD`."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    curves = steps()
    for line in RUNS.read_text().splitlines():
        run = json.loads(line)
        rows = curves[run["setting"], run["arm"]][run["seed"]]
        run["mean_reward"] = sum(row["reward"] for row in rows) / len(rows)
        run["steps_to"] = steps_to(rows, THRESHOLD)
        found[run["setting"], run["arm"]][run["seed"]] = run
    return found


@cache
def steps() -> dict[tuple[str, str], dict[int, list[dict[str, Any]]]]:
    """Each run's steps, by (setting, arm) and seed."""
    found: dict[tuple[str, str], dict[int, list]] = defaultdict(lambda: defaultdict(list))
    for row in pq.read_table(STEPS).to_pylist():
        found[row["setting"], row["arm"]][row["seed"]].append(row)
    return found


def over_seeds(setting: str, arm: str, name: str) -> dict[str, Any]:
    """Mean, standard deviation and interval of one number over seeds."""
    return spread([run[name] for run in runs().get((setting, arm), {}).values() if run[name] is not None])


@dataclass(frozen=True, slots=True)
class Difference:
    """One arm less another, seed by seed: the same seed draws the same problems and the same first batch."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def sign(self) -> int:
        """1 or -1 where the interval excludes 0, else 0."""
        return (self.low > 0) - (self.high < 0)

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def difference(setting: str, arm: str, other: str, name: str = "accuracy_after") -> Difference | None:
    """None with fewer than two seeds in common."""
    first, second = runs().get((setting, arm), {}), runs().get((setting, other), {})
    common = sorted(first.keys() & second.keys())
    if len(common) < 2:
        return None
    found = spread([first[seed][name] - second[seed][name] for seed in common])
    return Difference(found["mean"], found["low"], found["high"], len(common))


def rows(settings: Sequence[str], arms: Sequence[str]) -> list[str]:
    """A Markdown table of arms in settings: accuracy, collapse, speed and what the region did."""
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
    """A Markdown table of paired differences in the final accuracy and in the mean reward over training."""
    lines = ["| setting | difference | seeds | final accuracy [95 %] | mean reward [95 %] |", "|---|---|---|---|---|"]
    for setting in settings:
        for arm, other in pairs:
            final, reward = difference(setting, arm, other), difference(setting, arm, other, "mean_reward")
            if final is not None:
                lines.append(f"| {setting} | `{arm}` − `{other}` | {final.seeds} | {final} | {reward} |")
    return lines

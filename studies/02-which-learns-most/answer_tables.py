"""Failed runs by learning rate, and the arms against PPO's published clip. Neither is registered."""

import statistics
from collections.abc import Mapping
from typing import Any

import study
from second_study import MEASURES, Runs, gap

HIGHEST = max(study.RATES)
NAMES = {
    "dppo-topk-tv-capped": "`dppo-topk-tv` with a cap of 2",
    "dppo-binary-tv-capped": "`dppo-binary-tv` with a cap of 2",
    "cispo": "`cispo`, a cap of 2 alone",
    "pg-is": "no region",
}
DECIDING = ("decide", "anchors", "updates", "cap", "cap-size")


def failed(run: Mapping[str, Any]) -> bool:
    """Returns whether a run ended below its start."""
    return run["accuracy"][-1] < run["accuracy"][0]


def counted(runs: Runs) -> str:
    """Returns the number of failed runs, of all."""
    return f"{sum(map(failed, runs))} of {len(runs):,}"


def failed_at_highest() -> dict[str, str]:
    """Returns each arm's count of failed runs at the highest learning rate."""
    tuned = study.read("tune") + study.read("cap-tune")
    return {
        arm: counted([run for run in tuned if run["name"] == arm and run["lr"] == HIGHEST])
        for arm in dict.fromkeys(run["name"] for run in tuned)
    }


def failures() -> str:
    """Returns the counts of runs that ended below their start, by arm and learning rate, of all registered stages."""
    every = [run for stage in study.STAGES for run in study.read(stage)]
    tuned = study.read("tune") + study.read("cap-tune")
    rows = []
    for arm in dict.fromkeys(run["name"] for run in tuned):
        own = [run for run in tuned if run["name"] == arm]
        at_highest, between, below = (
            [run for run in own if low <= run["lr"] < high]
            for low, high in ((HIGHEST, 1.0), (0.0056, HIGHEST), (0.0, 0.0056))
        )
        share = sum(map(failed, at_highest)) / len(at_highest)
        name = NAMES.get(arm, f"`{arm}`")
        rows.append((share, f"| {name} | {counted(at_highest)} | {counted(between)} | {counted(below)} |"))
    decided = [run for stage in DECIDING for run in study.read(stage)]
    four = [run for run in study.read("updates-tune") if run["name"].endswith("@4") and run["lr"] == 0.032]
    lines = [
        f"| arm, 16 updates | at {HIGHEST:g}, the highest rate | from 0.0056 | below |", "|---|---|---|---|",
        *(row for _, row in sorted(rows, key=lambda row: row[0])), "",
        f"In all stages {counted(every)} registered runs ended below their start; {counted(decided)} did in the stages "
        f"after tuning. With 4 updates at the highest rate, 0.032, it is {counted(four)}: every run of all four arms.",
    ]  # fmt: skip
    return "\n".join(lines)


def published_runs() -> list[dict[str, Any]]:
    """Returns the tuning runs of PPO with its published clip, at the learning rate with the highest mean area."""
    runs = [run for run in study.read("tune") if run["name"] == "ppo" and run["overrides"] == study.ratio(0.2)]
    by_rate = {rate: [run for run in runs if run["lr"] == rate] for rate in study.RATES}
    return max(by_rate.values(), key=lambda one: statistics.fmean(run["auc"] for run in one))


def chosen_runs(arm: str) -> list[dict[str, Any]]:
    """Returns the runs of an arm's chosen setting on the first tuning seeds."""
    stage = "cap-tune" if arm in study.CAPPED else "tune"
    setting = study.chosen(study.read(stage))[arm]
    return [
        run for run in study.read(stage)
        if run["name"] == arm and run["seed"] in study.FIRST_SEEDS
        and (run["lr"], run["overrides"]) == (setting["lr"], setting["overrides"])
    ]  # fmt: skip


def published() -> str:
    """Returns the differences of all arms to PPO's published clip on the tuning seeds that both have."""
    others = published_runs()
    lines = [
        f"| arm − `ppo` 0.2/0.28 at its best rate, {others[0]['lr']:g} | seeds | area [95%] | last accuracy [95%] |",
        "|---|---|---|---|",
    ]
    for arm in (*study.PRIMARY, *study.CAPPED):
        runs = chosen_runs(arm)
        gaps = " | ".join(gap(runs, others, measure) for measure in MEASURES)
        name = "`ppo` 0.8/1.12" if arm == "ppo" else NAMES.get(arm, f"`{arm}`")
        lines.append(f"| {name} | {len(runs)} | {gaps} |")
    return "\n".join(lines)

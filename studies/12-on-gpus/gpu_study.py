"""The study for whoever has 8 GPUs: Qwen3-1.7B, five arms, two tasks, two learning rates. Not run by us.

    python studies/12-on-gpus/gpu_study.py run FOLDER      # 100 runs, resumable; --task and --rate choose a part
    python studies/12-on-gpus/gpu_study.py judge FOLDER    # verdicts as Markdown, all data in FOLDER/study.json

REGISTRATION.md fixes arms, seeds, metric and rules. The verdicts are computed by the code of 02-which-learns-most.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from trustrl.files import parsed_json, read_regular, write_json
from trustrl.runs.run_directory import StoredRun, checked_result, checked_rows

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "02-which-learns-most"))
import verdicts

RECIPES = HERE.parents[1] / "recipes/evidence"
TASKS, RATES, SEEDS = ("gsm8k", "dapo"), (1e-6, 1e-5), 5
ARMS = ("no-region", "ppo", "dppo-scaling", "dppo-topk-tv-capped", "troll")
QUESTIONS = (
    ("PPO against no region", "ppo", "no-region"),
    ("Binary DPPO against PPO", "dppo-scaling", "ppo"),
    ("capped Top-K against PPO", "dppo-topk-tv-capped", "ppo"),
    ("TROLL against PPO", "troll", "ppo"),
)
HELD, LAST = 0.95, 3
"""A run is held if the mean of its last `LAST` accuracies is at least this share of its best mean of as many."""


def folder_of(root: Path, task: str, rate: float) -> Path:
    """Returns the folder of one comparison."""
    return root / f"{task}-{rate:g}"


def command(root: Path, task: str, rate: float) -> list[str]:
    """Returns the command that trains the missing runs of a task at a learning rate."""
    out = str(folder_of(root, task, rate))
    arms = ("--arms", str(RECIPES / "gpu-arms.toml"), "--seeds", str(SEEDS), "--out", out)
    recipe = str(RECIPES / f"gpu-{task}.toml")
    return [sys.executable, "-m", "trustrl", "compare", recipe, f"optimiser.learning_rate={rate:g}", *arms]


def run_of(task: str, rate: float, arm: str, seed: int, folder: Path) -> dict[str, Any] | None:
    """Returns the accuracies of a finished run, what it ran on, and its seconds. None before it has finished."""
    stored = StoredRun(folder)
    result = checked_result(stored)
    accuracies = [row["accuracy"] for row in checked_rows(stored, "evaluation")]
    if not result or len(accuracies) <= LAST:
        return None
    after = accuracies[1:]
    return {
        "task": task, "rate": rate, "name": arm, "seed": seed, "accuracy": accuracies, "auc": sum(after) / len(after),
        "held": held(accuracies), "seconds": result.get("seconds"),
        "environment": parsed_json(read_regular(folder / "environment.json")),
    }  # fmt: skip


def held(accuracies: Sequence[float]) -> bool:
    """Returns True if the run ends near its best: it learned, and stayed there."""
    means = [sum(accuracies[end - LAST : end]) / LAST for end in range(LAST, len(accuracies) + 1)]
    return means[-1] >= HELD * max(means)


def collected(root: Path) -> Iterator[dict[str, Any]]:
    """Yields the finished runs."""
    for task in TASKS:
        for rate in RATES:
            for arm in ARMS:
                for seed in range(SEEDS):
                    run = run_of(task, rate, arm, seed, folder_of(root, task, rate) / arm / f"seed-{seed}")
                    if run is not None:
                        yield run


def judged(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the verdicts by the registered rules. Questions whose runs are not complete have none."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        if run["rate"] == RATES[0]:
            found.setdefault(f"{run['task']}: {run['name']}", {})[run["seed"]] = run["auc"]
    complete = {arm for arm, seeds in found.items() if len(seeds) == SEEDS}
    family = [
        (f"{task}: {question}", f"{task}: {arm}", f"{task}: {other}")
        for task in TASKS
        for question, arm, other in QUESTIONS
        if {f"{task}: {arm}", f"{task}: {other}"} <= complete
    ]
    answers = verdicts.answers(found, family)
    parts = [f"{len(runs)} of {len(TASKS) * len(RATES) * len(ARMS) * SEEDS} runs, {len(family)} of 8 questions."]
    if answers:
        parts.append(verdicts.table(answers))
    return "\n\n".join([*parts, stability(runs)])


def stability(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of runs that were held at the highest rate, with exact 95% intervals, and its verdict."""
    lines = ["| arm | held | share [95%] |", "|---|---|---|"]
    shares: dict[str, float] = {}
    for arm in ARMS:
        ended = [run["held"] for run in runs if run["name"] == arm and run["rate"] == RATES[1]]
        if len(ended) == len(TASKS) * SEEDS:
            shares[arm] = sum(ended) / len(ended)
            low, high = stats.binomtest(sum(ended), len(ended)).proportion_ci(0.95)
            lines.append(f"| `{arm}` | {sum(ended)} of {len(ended)} | {shares[arm]:.2f} [{low:.2f}, {high:.2f}] |")
    if set(shares) < set(ARMS):
        return "Stability: not judged before all runs at the highest rate have finished."
    speaks = shares["no-region"] <= 0.5
    lines += ["", f"Stability: the study {'can' if speaks else 'cannot'} speak about it, by the rule of the page."]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("run", "judge"))
    parser.add_argument("folder", type=Path, help="Folder for the runs")
    parser.add_argument("--task", choices=TASKS, action="append", help="Run this task alone (default: both)")
    parser.add_argument(
        "--rate", choices=RATES, type=float, action="append", help="Run this rate alone (default: both)"
    )
    options = parser.parse_args()
    if options.what == "run":
        parts = [(task, rate) for rate in options.rate or RATES for task in options.task or TASKS]
        return max(subprocess.run(command(options.folder, *part), check=False).returncode for part in parts)
    runs = list(collected(options.folder))
    write_json(options.folder / "study.json", {"registration": "studies/12-on-gpus/REGISTRATION.md", "runs": runs})
    print(judged(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())

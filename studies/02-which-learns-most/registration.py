"""Tables of docs/results/registration-2.md, from the plan and from the pilot's runs.

    python studies/02-which-learns-most/registration.py

Run it before the registration is committed, and not after deciding runs.
"""

import json
import statistics
import sys
from pathlib import Path

import study
from verdicts import power

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from pages import fill

PAGE = study.DATA.parent / "registration-2.md"
SECONDS = {
    "pg-is": 8.2, "ppo": 8.2, "dppo-binary-tv": 8.2, "ipo": 8.2, "dppo-topk-tv": 10.0, "troll": 11.6,
    "score-centering": 12.5,
}  # fmt: skip
"""Seconds of a run on one core, four times those of three rollouts."""


def arms() -> str:
    """Returns the grid of each arm."""
    lines = ["| arm | learning rates | thresholds |", "|---|---|---|"]
    for arm, thresholds in study.THRESHOLDS.items():
        rates = study.RATES if thresholds else study.FINE_RATES
        given = ", ".join(f"`{json.dumps(one)}`" for one in thresholds) or "–"
        shown = ", ".join(f"{rate:g}" for rate in rates) if thresholds else f"15 from {rates[0]:g} to {rates[-1]:g}"
        lines.append(f"| `{arm}` | {shown} | {given} |")
    return "\n".join(lines)


def pilot() -> str:
    """Returns the pilot's areas, one row for each arm and threshold."""
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for run in study.read("pilot"):
        one = found.setdefault((run["preset"], json.dumps(run["overrides"])), {})
        one.setdefault(run["lr"], []).append(run["auc"])
    lines = ["| arm | threshold | " + " | ".join(f"{rate:g}" for rate in study.PILOT_RATES) + " |"]
    lines.append("|---" * (2 + len(study.PILOT_RATES)) + "|")
    for (arm, threshold), by_rate in found.items():
        cells = [f"{statistics.fmean(by_rate[rate]):.4f}" if rate in by_rate else "–" for rate in study.PILOT_RATES]
        lines.append(f"| `{arm}` | `{threshold}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def size() -> str:
    """Returns seconds for each run, and hours of each stage with two processes."""
    tuned = len(study.FIRST_SEEDS) * len(study.grid("ppo")) + study.FINALISTS * (
        len(study.TUNE_SEEDS) - len(study.FIRST_SEEDS)
    )
    stages = {
        "tune": [SECONDS[arm] for arm in study.THRESHOLDS for _ in range(tuned)],
        "decide": [SECONDS[arm] for arm in study.PRIMARY for _ in study.DECIDE_SEEDS],
        "anchors": [
            SECONDS[arm] for arm in ("ipo", *(base for base, *_ in study.VARIANTS.values())) for _ in study.ANCHOR_SEEDS
        ],
    }
    hours = {stage: sum(costs) / 2 / 3600 for stage, costs in stages.items()}
    shown = ", ".join(f"`{arm}` {seconds:g}" for arm, seconds in SECONDS.items())
    parts = ", ".join(f"{len(costs):,} runs and {hours[stage]:.1f} h for `{stage}`" for stage, costs in stages.items())
    total = sum(hours.values())
    return f"Seconds of a run on one core: {shown}. With two processes that is {parts}: {total:.1f} h in all."


def main() -> None:
    for name, make in {"arms": arms, "pilot": pilot, "power": power, "size": size}.items():
        fill(PAGE, name, make())


if __name__ == "__main__":
    main()

"""Page, figures and front-page table of the second study, from its result files.

python studies/02-which-learns-most/second_study.py draw
python studies/02-which-learns-most/second_study.py page
"""

import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import study
import verdicts

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from pages import command, fill

PAGE = study.DATA.parent / "second-study.md"
TABLES = PAGE.with_name("second-study-tables.md")
README = PAGE.parents[2] / "README.md"
GUIDE = PAGE.parents[1] / "guides/choosing-a-region.md"
FIGURES = PAGE.parent / "figures"
Runs = Sequence[Mapping[str, Any]]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and half of its 95% t interval."""
    return statistics.fmean(values), float(verdicts.half_interval(values))


def by_arm(runs: Runs) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the runs of each arm, primary arms first."""
    found: dict[str, list[Mapping[str, Any]]] = {arm: [] for arm in study.PRIMARY}
    for run in runs:
        found.setdefault(run["name"], []).append(run)
    return {arm: made for arm, made in found.items() if made}


def missing(stage: str) -> str:
    """Returns a sentence if the stage has runs left. No verdict is computed before a stage is complete."""
    try:
        planned = len(study.plan(stage))
    except ValueError:
        return f"The stage `{stage}` has not started."
    made = len(study.read(stage))
    return "" if made == planned else f"The stage `{stage}` is not complete: {made} of {planned} runs."


@dataclass(frozen=True, slots=True)
class Family:
    """The answers of a registered family on the area, and the same differences in last accuracy."""

    areas: list[verdicts.Answer]
    lasts: list[verdicts.Answer]

    def table(self) -> str:
        """Returns every number of the family."""
        return verdicts.table(self.areas, self.lasts)

    def short(self) -> str:
        """Returns the differences and the verdicts alone."""
        lines = [
            "| question, 16 updates on a rollout | area [95%] | verdict on the area | last accuracy [95%] |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {one.question} | {verdicts.shown(one)} | **{one.verdict}** | {verdicts.shown(last)} |"
            for one, last in zip(self.areas, self.lasts, strict=True)
        ]
        return "\n".join(lines)


def clip() -> str:
    """Returns the clip of the tuned PPO, down and up."""
    ratio = study.chosen(study.read("tune"))["ppo"]["overrides"]["ratio"]
    return f"{ratio['max_decrease']:g}/{ratio['max_increase']:g}"


def answered(runs: Runs, questions: Iterable[tuple[str, str, str]]) -> Family:
    """Returns a family's answers. Questions name PPO's clip."""
    named = [(re.sub(r"\bPPO\b", f"PPO {clip()}", question), *arms) for question, *arms in questions]
    both = (
        verdicts.answers(verdicts.areas(runs, measure), named) for measure in (verdicts.area, verdicts.last_accuracy)
    )
    return Family(*both)


def families() -> dict[str, Family]:
    """Returns the answers of each registered family whose runs are complete."""
    decided = study.read("decide")
    questions = verdicts.with_better(study.QUESTIONS, study.chosen(study.read("tune")))
    found = {"primary": answered(decided, questions), "secondary": answered(decided, study.SECONDARY)}
    if not missing("anchors"):
        found["anchors"] = answered(verdicts.anchor_runs(), study.ANCHOR_QUESTIONS)
    if not missing("cap"):
        found["cap"] = answered(study.read("cap"), study.CAP_QUESTIONS)
    return found


def short(found: Iterable[Family]) -> str:
    """Returns the short tables of some families as one."""
    head, *rest = (one.short().split("\n") for one in found)
    return "\n".join(head + [line for lines in rest for line in lines[2:]])


def arms(runs: Runs) -> str:
    """Returns how each arm ended, how much its region acted, and how far the policy moved in a rollout."""
    lines = [
        "| arm | area | last accuracy | lowest area | ended below the start | masked at the last update | "
        "mean \\|log π/μ\\| there |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, made in by_arm(runs).items():
        area, half = interval([run["auc"] for run in made])
        last, last_half = interval([run["accuracy"][-1] for run in made])
        below = sum(run["accuracy"][-1] < run["accuracy"][0] for run in made)
        acted, moved = (statistics.fmean(run[key] for run in made) for key in ("masked_last", "log_ratio_last"))
        masked = f"{100 * acted:.1f}%" if acted else "–"
        lines.append(
            f"| `{arm}` | {area:.3f} ± {half:.3f} | {last:.3f} ± {last_half:.3f} | "
            f"{min(run['auc'] for run in made):.3f} | {below} of {len(made)} | {masked} | {moved:.3f} |"
        )
    return "\n".join(lines)


def settings(stage: str) -> str:
    """Returns the chosen setting of each arm of a tuning stage, and whether it is at an edge of the grid."""
    lines = [
        "| arm | learning rate | threshold | mean area | highest mean of the finalists | at an edge of the grid |",
        "|---|---|---|---|---|---|",
    ]
    for arm, one in study.chosen(study.read(stage)).items():
        rates = sorted({rate for rate, _ in study.grid(arm)})
        thresholds = [one for rate, one in study.grid(arm) if rate == rates[0]]
        edges = [name for name, at in (("lowest", rates[0]), ("highest", rates[-1])) if one["lr"] == at]
        edges = [f"{name} learning rate" for name in edges]
        if len(thresholds) > 1 and one["overrides"] in (thresholds[0], thresholds[-1]):
            edges.append("tightest threshold" if one["overrides"] == thresholds[0] else "loosest threshold")
        lines.append(
            f"| `{arm}` | {one['lr']:g} | {study.threshold(one['overrides'])} | {one['mean']:.3f} | "
            f"{one['best']:.3f} | {', '.join(edges) or 'no'} |"
        )
    return "\n".join(lines)


def grids() -> str:
    """Returns the mean area of each threshold and learning rate over the first tuning seeds."""
    runs = study.read("tune")
    lines = ["| arm | threshold | " + " | ".join(f"lr {rate:g}" for rate in study.RATES) + " |"]
    lines.append("|---" * (2 + len(study.RATES)) + "|")
    for arm, thresholds in study.THRESHOLDS.items():
        areas = dict(zip(map(str, study.grid(arm)), study.by_setting(runs, arm), strict=True))
        for one in thresholds:
            means = [
                statistics.fmean(areas[str((rate, one))][seed] for seed in study.FIRST_SEEDS) for rate in study.RATES
            ]
            lines.append(f"| `{arm}` | {study.threshold(one)} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    return "\n".join(lines)


def updates() -> str:
    """Returns area and last accuracy with 1, 4 and 16 updates on a rollout, on the same seeds, and the gaps to PPO."""
    seeds, rates = set(study.UPDATE_SEEDS), study.chosen_rates(study.read("updates-tune"))
    found = by_arm([run for run in study.read("decide") + study.read("updates") if run["seed"] in seeds])
    tuned = study.chosen(study.read("tune"))
    lines = [
        f"| updates | arm | learning rate | area | last accuracy | area − `ppo` {clip()} | last accuracy − `ppo` "
        f"{clip()} | area − its own with 4 |",
        "|---" * 8 + "|",
    ]
    for count in (*study.UPDATES, 16):
        for arm in study.UPDATE_ARMS:
            name, four, other = (of_updates(one, n) for one, n in ((arm, count), (arm, 4), ("ppo", count)))
            rate = tuned[arm]["lr"] if count == 16 else rates[name]
            cells = [plus_minus(map(measure, found[name])) for measure in MEASURES]
            cells += ["–" if arm == "ppo" else gap(found[name], found[other], measure) for measure in MEASURES]
            cells.append("–" if count == 4 else gap(found[name], found[four]))
            lines.append(f"| {count} | `{arm}` | {rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


MEASURES = (verdicts.area, verdicts.last_accuracy)


def of_updates(arm: str, count: int) -> str:
    """Returns the name of an arm's runs with a number of updates on a rollout."""
    return arm if count == 16 else f"{arm}@{count}"


def plus_minus(values: Iterable[float]) -> str:
    """Returns the mean and half of its interval."""
    mean, half = interval(list(values))
    return f"{mean:.3f} ± {half:.3f}"


def gap(runs: Runs, others: Runs, measure: Callable[[Mapping[str, Any]], float] = verdicts.area) -> str:
    """Returns the mean difference of two arms on the seeds that both have, with its interval."""
    ours, theirs = ({run["seed"]: measure(run) for run in one} for one in (runs, others))
    mean, half = interval([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def cap_sizes() -> str:
    """Returns the areas of Binary DPPO with every cap, in the settings tuned without a cap and with one."""
    seeds = set(study.CAP_SIZE_SEEDS)
    found = by_arm([run for run in study.read("cap") + study.read("cap-size") if run["seed"] in seeds])
    settings = study.chosen(study.read("tune")) | study.chosen(study.read("cap-tune"))
    names = [f"cap {cap:g}" if cap else "no cap" for cap in study.CAP_SIZES]
    lines = ["| tuned | learning rate | threshold | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for arm, tuned in study.CAP_SIZE_ARMS.items():
        cells = []
        for cap in study.CAP_SIZES:
            area, half = interval([run["auc"] for run in found[study.sized(arm, cap)]])
            cells.append(f"{area:.3f} ± {half:.3f}")
        bound = settings[arm]["overrides"]["max_increase"]
        how = f"with a cap of {tuned:g}" if tuned else "without a cap"
        lines.append(f"| {how} | {settings[arm]['lr']:g} | `max_increase={bound}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def hours() -> str:
    """Returns the number of runs and the CPU hours of each stage."""
    parts, total = [], 0.0
    for stage in study.STAGES:
        if missing(stage):
            continue
        runs = study.read(stage)
        spent = sum(run["cpu_seconds"] for run in runs) / 3600
        total += spent
        parts.append(f"{len(runs):,} runs and {spent:.1f} CPU hours in `{stage}`")
    return f"{', '.join(parts)}: {total:.1f} CPU hours in all, two processes at a time, on a machine without a GPU."


def page() -> None:
    """Writes the marked blocks of the pages and of the README."""
    import answer_tables

    found = families()
    fill(PAGE, "verdict", short([found["primary"]]))
    for name in ("primary", "secondary"):
        fill(TABLES, name, found[name].table())
    fill(TABLES, "settings", settings("tune"))
    fill(TABLES, "grids", grids())
    fill(PAGE, "secondary", short([found["secondary"]]))
    fill(TABLES, "failures", answer_tables.failures())
    fill(TABLES, "published", answer_tables.published())
    fill(TABLES, "arms", arms(study.read("decide")))
    fill(PAGE, "anchors", missing("anchors") or short([found["anchors"]]))
    fill(TABLES, "anchors", missing("anchors") or found["anchors"].table())
    fill(TABLES, "variants", "" if missing("anchors") else arms(study.read("anchors")))
    fill(TABLES, "updates", missing("updates") or updates())
    fill(PAGE, "cap", missing("cap") or short([found["cap"]]))
    fill(TABLES, "cap", missing("cap") or found["cap"].table())
    fill(TABLES, "capped", "" if missing("cap") else f"{arms(study.read('cap'))}\n\n{settings('cap-tune')}")
    fill(PAGE, "cap-sizes", missing("cap-size") or cap_sizes())
    fill(TABLES, "hours", hours())
    fill(README, "verdicts", short([found["primary"]]))


def draw() -> None:
    """Draws the curves of the deciding stage, and every difference with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from trustrl.runner.figures import COLOURS, LINES

    figure, (curves, gaps) = plt.subplots(1, 2, figsize=(11, 4.4), width_ratios=(1, 1.15))
    for at, (arm, made) in enumerate(by_arm(study.read("decide")).items()):
        values = np.array([run["accuracy"] for run in made])
        mean, half = values.mean(0), verdicts.half_interval(values)
        steps, color = range(values.shape[1]), COLOURS[at % len(COLOURS)]
        curves.plot(steps, mean, LINES[at % len(LINES)], color=color, label=arm, linewidth=1.4)
        curves.fill_between(steps, mean - half, mean + half, color=color, alpha=0.15, linewidth=0)
    curves.set_xlabel("rollout")
    curves.set_ylabel("held-out accuracy")
    curves.set_title("Mean of 60 seeds, with 95% intervals", fontsize=10)
    curves.legend(frameon=False, fontsize=8)
    every = [one for family in families().values() for one in family.areas]
    gaps.axvspan(-verdicts.MARGIN, verdicts.MARGIN, color="#dddddd", label=f"margin ±{verdicts.MARGIN:g}")
    gaps.axvline(0, color="#555555", linewidth=0.8)
    for row, one in enumerate(reversed(every)):
        half = (one.high - one.low) / 2
        gaps.errorbar(one.mean, row, xerr=half, fmt="o", color=COLOURS[0], markersize=4, capsize=2)
    gaps.set_yticks(range(len(every)), [f"{one.question}: {one.verdict}" for one in reversed(every)], fontsize=8)
    gaps.yaxis.tick_right()
    gaps.set_xlabel("difference in area, paired by seed")
    gaps.set_title("Differences, 95% intervals", fontsize=10)
    gaps.legend(frameon=False, fontsize=8, loc="lower left")
    for axis in (curves, gaps):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    figure.tight_layout()
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / "second-study.png", dpi=130)


if __name__ == "__main__":
    command(__doc__, page=page, draw=draw)

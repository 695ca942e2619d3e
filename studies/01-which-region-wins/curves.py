"""Figures of each question: reward during training and held-out accuracy after it, in each setting."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from findings import over_seeds, rewards_of_rollouts, runs

from trustrl.runner.figures import COLOURS, FEW_ROLLOUTS, LINES
from trustrl.runs.run_verdict import FEWEST_ROLLOUTS, windows

MOST_BANDS = 4
FIGURES = Path(__file__).parents[2] / "docs/results/figures"


def draw(name: str, settings: Sequence[str], arms: Sequence[str]) -> Path:
    """Saves the figure: means over seeds, with their range as a band if the arms are few.

    If a run has few rollouts, each is a marker. Otherwise a line shows the mean of three.
    """
    columns = min(len(arms), 2 * len(settings), 4)
    figure, axes = plt.subplots(
        2, len(settings), figsize=(3.9 * len(settings) + 1.2, 4.6 + 0.22 * len(arms)), squeeze=False, sharey="row",
        height_ratios=[3, 0.6 + 0.33 * len(arms)],
    )  # fmt: skip
    counts = {
        setting: max((len(one) for arm in arms for one in rewards_of_rollouts(setting, arm).values()), default=0)
        for setting in settings
    }
    for top, bottom, setting in zip(*axes, settings, strict=True):
        top.set_title(f"{setting}: {counts[setting]} rollouts", fontsize=11)
        top.set_xlabel("updates before the rollout")
        bottom.set_xlabel("held-out accuracy, 95 % interval; grey: before")
        for at, arm in enumerate(arms):
            colour, line = COLOURS[at % len(COLOURS)], LINES[at % len(LINES)]
            _curve(top, setting, arm, colour, line, band=len(arms) <= MOST_BANDS)
            _accuracy(bottom, setting, arm, at, colour)
        bottom.set_yticks(range(len(arms)), arms)
        bottom.set_ylim(len(arms) - 0.5, -0.5)
        bottom.set_xlim(-0.02, 1.02)
    smoothed = "\n(line without markers: of three)" if max(counts.values()) > FEW_ROLLOUTS else ""
    axes[0][0].set_ylabel(f"mean reward of a rollout{smoothed}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=columns, frameon=False, fontsize=9)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 0.95 - 0.035 * ((len(arms) - 1) // columns)))
    FIGURES.mkdir(parents=True, exist_ok=True)
    file = FIGURES / f"{name}.png"
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file


def _curve(axis, setting: str, arm: str, colour: str, line: str, *, band: bool) -> None:
    made = list(rewards_of_rollouts(setting, arm).values())
    if not made:
        return
    few = len(made[0]) <= FEW_ROLLOUTS
    series = [[reward for _, reward in one] for one in made]
    if not few:
        series = [windows(one, FEWEST_ROLLOUTS) for one in series]
    at, at_each = [step for step, _ in made[0]], list(zip(*series, strict=True))
    marks = {"marker": "o", "ms": 4, "linewidth": 0.9} if few else {"linewidth": 1.8}
    axis.plot(at, [sum(v) / len(v) for v in at_each], line, color=colour, label=arm, **marks)
    if band:
        axis.fill_between(at, list(map(min, at_each)), list(map(max, at_each)), color=colour, alpha=0.09, linewidth=0)


def _accuracy(axis, setting: str, arm: str, at: int, colour: str) -> None:
    made = runs().get((setting, arm), {})
    if not made:
        return
    after, before = (over_seeds(setting, arm, f"accuracy_{when}") for when in ("after", "before"))
    axis.plot(
        [run["accuracy_after"] for run in made.values()], [at - 0.18] * len(made), "o", color=colour, alpha=0.45, ms=3.5
    )
    half = 0.0 if after["low"] is None else after["mean"] - after["low"]
    axis.errorbar(after["mean"], at + 0.1, xerr=half, fmt="o", color=colour, capsize=3, ms=5)
    axis.plot(before["mean"], at, "|", color="#555555", ms=13)

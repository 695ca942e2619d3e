"""A run as a picture, and a comparison as two, from its `table.json` alone."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from trustrl.errors import MissingDataError
from trustrl.metrics import PROBABILITY_EDGES, bin_names
from trustrl.packages import need
from trustrl.runner.directory import RunDirectory
from trustrl.runner.summary import mean_of, rewards_of, rollouts, windows

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#555555", "#e69f00", "#56b4e9", "#000000")
LINES = ("-", "--", "-.", ":")
FEW_ROLLOUTS = 24
"""Up to so many rollouts each one is drawn as a marker."""


def draw(folder: Path) -> list[Path]:
    """Draws `curves.png` and `accuracy.png` into the folder.

    Raises:
        MissingDataError: it holds no `table.json`.
        MissingPackageError: matplotlib is not installed.
    """
    file = folder / "table.json"
    if not file.is_file():
        raise MissingDataError(f"{folder} must hold a table.json, and it does not. `trustrl compare` writes it.")
    found = json.loads(file.read_text(encoding="utf-8"))
    need("matplotlib", extra="plots").use("Agg")
    return [_curves(found, folder / "curves.png"), _accuracies(found, folder / "accuracy.png")]


def draw_run(directory: RunDirectory, updates_per_batch: int = 1) -> Path:
    """Draws `run.png` into a run's folder: what it learned, what the region did, and to which tokens.

    Args:
        directory: The run's folder.
        updates_per_batch: Updates made on each rollout; the reward is drawn once per rollout.

    Raises:
        MissingDataError: no step was measured.
        MissingPackageError: matplotlib is not installed.
    """
    rows = directory.rows()
    if not rows:
        raise MissingDataError(
            f"{directory.path} must hold measured steps, and it has none. `trustrl run` writes them."
        )
    need("matplotlib", extra="plots").use("Agg")
    plt = need("matplotlib.pyplot", extra="plots")
    figure, (learned, acted, where) = plt.subplots(1, 3, figsize=(11, 3.3))
    steps = [row["step"] for row in rows]
    sampled = rollouts(rows, updates_per_batch)
    rewarded = [row for row in sampled if row["reward"] is not None]
    _rewards(learned, [row["step"] for row in rewarded], rewards_of(rewarded), "-", COLOURS[0], "reward of the rollout")
    evaluations = directory.rows("evaluation")
    marks = {"color": COLOURS[1], "marker": "o", "linestyle": "none", "label": "held-out accuracy"}
    learned.plot([row["step"] for row in evaluations], [row["accuracy"] for row in evaluations], **marks)
    learned.set_ylim(0, 1.02)
    learned.legend(frameon=False, fontsize=8)
    for name, line in (("masked", "-"), ("projected", "--")):
        shares = [row.get(f"trustrl/{name}_share") for row in rows]
        if any(share is not None for share in shares):
            acted.plot(steps, [share or 0.0 for share in shares], line, color=COLOURS[0], label=name, linewidth=1.2)
            acted.legend(frameon=False, fontsize=8)
    acted.set_ylabel("share of tokens")
    for axis in (learned, acted):
        axis.set_xlabel("step (update of the weights)")
    _by_probability(where, rows)
    for axis, title in ((learned, "what it learned"), (acted, "what the region did"), (where, "to which tokens")):
        axis.set_title(title, fontsize=10, loc="left")
    return _saved(figure, (learned, acted, where), directory.path / "run.png")


def _rewards(axis: Any, at: Sequence[int], rewards: Sequence[float], line: str, colour: str, label: str) -> None:
    """Draws one marker per rollout where there are few of them, else a line through their running mean."""
    few = len(rewards) <= FEW_ROLLOUTS
    values = rewards if few else windows(rewards, len(rewards) // FEW_ROLLOUTS)
    marks: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 0.9} if few else {"linewidth": 1.8}
    axis.plot(at, values, line, color=colour, label=label, **marks)


def shares_by_probability(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The masked share of the tokens in each bin of their probability when sampled; None where there are none."""
    edges = (0.0, *PROBABILITY_EDGES, 1.0)
    names = bin_names("trustrl/masked_share_probability", PROBABILITY_EDGES)
    labels = (f"{low:g} – {high:g}" for low, high in pairwise(edges))
    return {label: mean_of(rows, name) for label, name in zip(labels, names, strict=True)}


def _by_probability(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    shares = shares_by_probability(rows)
    axis.barh(range(len(shares)), [share or 0.0 for share in shares.values()], color=COLOURS[0])
    axis.set_yticks(range(len(shares)), list(shares), fontsize=8)
    for at, share in enumerate(shares.values()):
        if share is None:
            axis.annotate("no such token", (0, at), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axis.set_xlabel("masked share of such tokens")
    axis.set_ylabel("probability when sampled")


def _styles(regions: Sequence[str]) -> dict[str, tuple[str, str]]:
    return {name: (COLOURS[i % len(COLOURS)], LINES[i % len(LINES)]) for i, name in enumerate(regions)}


def _curves(found: Mapping[str, Any], file: Path) -> Path:
    """Reward, and the share of tokens the region acted on: mean and range over seeds."""
    plt = need("matplotlib.pyplot", extra="plots")
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7.5, 6.4), sharex=True)
    for region, (colour, line) in _styles(list(found["regions"])).items():
        runs = [run for run in found["runs"] if run["region"] == region and run["finished"]]
        rewards = [run["rollouts"]["reward"] for run in runs]
        shares = [windows(_shares(run), max(1, len(run["step"]) // 20)) for run in runs]
        for axis, series, steps in (
            (top, rewards, runs[0]["rollouts"]["step"] if runs else []),
            (bottom, shares, runs[0]["step"] if runs else []),
        ):
            if not series or any(len(one) != len(steps) for one in series):
                continue
            at_each = list(zip(*series, strict=True))
            means = [sum(v) / len(v) for v in at_each]
            if axis is top:
                _rewards(axis, steps, means, line, colour, region)
            else:
                axis.plot(steps, means, line, color=colour, label=region, linewidth=1.8)
            axis.fill_between(steps, list(map(min, at_each)), list(map(max, at_each)), color=colour, alpha=0.13, lw=0)
    top.set_ylabel("reward of the rollout")
    bottom.set_ylabel("share of tokens\nstopped or projected")
    bottom.set_xlabel("step (update of the weights)")
    seeds = max(row["finished"] for row in found["regions"].values())
    top.set_title(f"mean and range of {seeds} seed{'s' * (seeds != 1)}", fontsize=10, loc="left")
    top.legend(frameon=False, fontsize=9)
    return _saved(figure, (top, bottom), file)


def _shares(run: Mapping[str, Any]) -> list[float]:
    curves = run["curves"]
    kinds = [curves.get(f"trustrl/{kind}_share", [0.0] * len(run["step"])) for kind in ("masked", "projected")]
    return [(a or 0.0) + (b or 0.0) for a, b in zip(*kinds, strict=True)]


def _accuracies(found: Mapping[str, Any], file: Path) -> Path:
    """Held-out accuracy before and after: every seed, the mean and its confidence interval."""
    plt = need("matplotlib.pyplot", extra="plots")
    regions = list(found["regions"])
    figure, axis = plt.subplots(figsize=(7.5, 1.2 + 0.55 * len(regions)))
    for at, (region, (colour, _)) in enumerate(_styles(regions).items()):
        row = found["regions"][region]
        seeds = [r["result"]["accuracy_after"] for r in found["runs"] if r["region"] == region and r["finished"]]
        after = row["accuracy_after"]
        axis.plot(seeds, [at - 0.16] * len(seeds), "o", color=colour, alpha=0.45, markersize=4)
        if after["mean"] is not None:
            half = 0.0 if after["low"] is None else after["mean"] - after["low"]
            axis.errorbar(after["mean"], at + 0.08, xerr=half, fmt="o", color=colour, capsize=4, markersize=7)
        if row["accuracy_before"]["mean"] is not None:
            axis.plot(row["accuracy_before"]["mean"], at + 0.08, "|", color="#555555", markersize=14)
    axis.set_yticks(range(len(regions)), regions)
    axis.set_ylim(len(regions) - 0.5, -0.5)
    axis.set_xlabel("held-out accuracy: seeds (small), mean with 95 % t interval; grey bar: before training")
    return _saved(figure, (axis,), file)


def _saved(figure: Any, axes: Sequence[Any], file: Path) -> Path:
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    need("matplotlib.pyplot", extra="plots").close(figure)
    return file

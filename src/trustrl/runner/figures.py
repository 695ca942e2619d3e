"""Figures: one for a run, and two for a comparison, drawn from its `table.json` alone."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from trustrl.core.sum_table import PROBABILITY_EDGES, bin_names
from trustrl.errors import MissingDataError, RecordError
from trustrl.files import parsed_json, read_regular
from trustrl.optional_imports import need
from trustrl.runs.figure_style import COLOURS, LINES, saved
from trustrl.runs.run_directory import StoredRun, checked_rows
from trustrl.runs.run_verdict import mean_of, rewards_of, rollouts, windows

MOST_REGIONS = 200
FEW_ROLLOUTS = 24
"""Largest number of rollouts that are drawn as separate markers."""


def draw(folder: Path) -> list[Path]:
    """Draws `curves.png` and `accuracy.png` into the directory and returns their paths.

    Raises:
        MissingDataError: If the directory has no `table.json`.
        RecordError: If `table.json` is not such a table.
        MissingPackageError: If matplotlib is not installed.
    """
    file = folder / "table.json"
    if not file.is_file():
        raise MissingDataError(f"{folder} must contain a table.json, got none. Run `trustrl compare` first.")
    need("matplotlib", extra="plots").use("Agg")
    try:
        results = parsed_json(read_regular(file))
        if len(results["regions"]) > MOST_REGIONS:
            raise ValueError(f"more than {MOST_REGIONS} regions")
        return [_curves(results, folder / "curves.png"), _accuracies(results, folder / "accuracy.png")]
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise RecordError(f"{file} must be a table as `trustrl compare` writes it, got: {error!r:.200}.") from error


def draw_run(run: StoredRun, updates_per_batch: int = 1) -> Path:
    """Draws `run.png` into a run's directory: rewards, the region's actions, and the tokens it acted on.

    Args:
        run: The run's directory.
        updates_per_batch: The number of updates on each rollout. The reward is drawn once per rollout.

    Raises:
        MissingDataError: If the run has no metrics.
        MissingPackageError: If matplotlib is not installed.
    """
    rows = checked_rows(run)
    if not rows:
        raise MissingDataError(
            f"{run.path} must contain metrics of at least one step, got none. Run `trustrl run` first."
        )
    need("matplotlib", extra="plots").use("Agg")
    plt = need("matplotlib.pyplot", extra="plots")
    figure, (learned, acted, where) = plt.subplots(1, 3, figsize=(11, 3.3))
    steps = [row["step"] for row in rows]
    sampled = rollouts(rows, updates_per_batch)
    rewarded = [row for row in sampled if row["reward"] is not None]
    _rewards(learned, [row["step"] for row in rewarded], rewards_of(rewarded), "-", COLOURS[0], "reward of the rollout")
    evaluations = checked_rows(run, "evaluation")
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
    for axis, title in (
        (learned, "reward and accuracy"),
        (acted, "tokens the region acted on"),
        (where, "masked by probability"),
    ):
        axis.set_title(title, fontsize=10, loc="left")
    return saved(figure, (learned, acted, where), run.path / "run.png")


def _rewards(axis: Any, steps: Sequence[int], rewards: Sequence[float], line: str, colour: str, label: str) -> None:
    """Draws one marker per rollout if they are few, else a line through their running mean."""
    few = len(rewards) <= FEW_ROLLOUTS
    values = rewards if few else windows(rewards, len(rewards) // FEW_ROLLOUTS)
    marks: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 0.9} if few else {"linewidth": 1.8}
    axis.plot(steps, values, line, color=colour, label=label, **marks)


def shares_by_probability(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Returns the masked share of the tokens by their probability when sampled; None for bins without tokens."""
    edges = (0.0, *PROBABILITY_EDGES, 1.0)
    names = bin_names("trustrl/masked_share_probability", PROBABILITY_EDGES)
    labels = (f"{low:g} – {high:g}" for low, high in pairwise(edges))
    return {label: mean_of(rows, name) for label, name in zip(labels, names, strict=True)}


def _by_probability(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    shares = shares_by_probability(rows)
    axis.barh(range(len(shares)), [share or 0.0 for share in shares.values()], color=COLOURS[0])
    axis.set_yticks(range(len(shares)), list(shares), fontsize=8)
    for position, share in enumerate(shares.values()):
        if share is None:
            axis.annotate("no tokens", (0, position), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axis.set_xlabel("masked share of these tokens")
    axis.set_ylabel("probability when sampled")


def _styles(regions: Sequence[str]) -> dict[str, tuple[str, str]]:
    return {name: (COLOURS[i % len(COLOURS)], LINES[i % len(LINES)]) for i, name in enumerate(regions)}


def _curves(results: Mapping[str, Any], file: Path) -> Path:
    """Draws the reward and the share of tokens the region acted on: mean and range over seeds."""
    plt = need("matplotlib.pyplot", extra="plots")
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7.5, 6.4), sharex=True)
    for region, (colour, line) in _styles(list(results["regions"])).items():
        runs = [run for run in results["runs"] if run["region"] == region and run["finished"]]
        rewards = [run["rollouts"]["reward"] for run in runs]
        shares = [windows(_shares(run), max(1, len(run["step"]) // 20)) for run in runs]
        for axis, series, steps in (
            (top, rewards, runs[0]["rollouts"]["step"] if runs else []),
            (bottom, shares, runs[0]["step"] if runs else []),
        ):
            if not series or any(len(values) != len(steps) for values in series):
                continue
            at_each = list(zip(*series, strict=True))
            means = [sum(v) / len(v) for v in at_each]
            if axis is top:
                _rewards(axis, steps, means, line, colour, region)
            else:
                axis.plot(steps, means, line, color=colour, label=region, linewidth=1.8)
            axis.fill_between(steps, list(map(min, at_each)), list(map(max, at_each)), color=colour, alpha=0.13, lw=0)
    top.set_ylabel("reward of the rollout")
    bottom.set_ylabel("share of tokens\nmasked or projected")
    bottom.set_xlabel("step (update of the weights)")
    seeds = max(row["finished"] for row in results["regions"].values())
    top.set_title(f"mean and range of {seeds} seed{'s' * (seeds != 1)}", fontsize=10, loc="left")
    top.legend(frameon=False, fontsize=9)
    return saved(figure, (top, bottom), file)


def _shares(run: Mapping[str, Any]) -> list[float]:
    curves = run["curves"]
    kinds = [curves.get(f"trustrl/{kind}_share", [0.0] * len(run["step"])) for kind in ("masked", "projected")]
    return [(a or 0.0) + (b or 0.0) for a, b in zip(*kinds, strict=True)]


def _accuracies(results: Mapping[str, Any], file: Path) -> Path:
    """Draws the held-out accuracy before and after: every seed, the mean and its confidence interval."""
    plt = need("matplotlib.pyplot", extra="plots")
    regions = list(results["regions"])
    figure, axis = plt.subplots(figsize=(7.5, 1.2 + 0.55 * len(regions)))
    for position, (region, (colour, _)) in enumerate(_styles(regions).items()):
        row = results["regions"][region]
        seeds = [r["result"]["accuracy_after"] for r in results["runs"] if r["region"] == region and r["finished"]]
        after = row["accuracy_after"]
        axis.plot(seeds, [position - 0.16] * len(seeds), "o", color=colour, alpha=0.45, markersize=4)
        if after["mean"] is not None:
            half = 0.0 if after["low"] is None else after["mean"] - after["low"]
            axis.errorbar(after["mean"], position + 0.08, xerr=half, fmt="o", color=colour, capsize=4, markersize=7)
        if row["accuracy_before"]["mean"] is not None:
            axis.plot(row["accuracy_before"]["mean"], position + 0.08, "|", color="#555555", markersize=14)
    axis.set_yticks(range(len(regions)), regions)
    axis.set_ylim(len(regions) - 0.5, -0.5)
    axis.set_xlabel("held-out accuracy: seeds (small), mean with 95% t interval; gray bar: before training")
    return saved(figure, (axis,), file)

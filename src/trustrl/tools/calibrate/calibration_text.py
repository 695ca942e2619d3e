"""Calibrations for the terminal and as a figure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trustrl.optional_imports import need
from trustrl.tools.audit import TokenCounts, percent, table, wrapped
from trustrl.tools.calibrate.calibration import CURVES, QUANTILES, TITLES, curves
from trustrl.tools.calibrate.noise_counts import GRID, NOISE

COLOURS = {"noise": "#d55e00", "masked": "#0072b2", "bad_left": "#cc79a7", "certified": "#009e73"}
LINES = {"noise": "-", "masked": "--", "bad_left": ":", "certified": "-."}
AGAINST = {
    "proximal": "the recorded π'",
    "policy": "π, which equals π' there (the records have no proximal_logp)",
    "both": "the recorded π', or with π, equal there, where π' is null",
}
LEAST = 1e-5
"""Shares below this are drawn at the lower edge of the figure."""


def text(report: Mapping[str, Any]) -> str:
    """Formats the noise, the effect of thresholds, and the recommendation for the terminal."""
    lines = [
        f"{report['rows']:,} tokens × updates; noise from {report['noise']:,} tokens of {report['sequences']:,} "
        "sequences before",
        f"their first update: μ compared with {AGAINST[report['against']]}",
        "",
        "Noise, rounded up to two digits",
        *table(
            [
                ["quantile", *(f"{100 * q:g}%" if q < 1 else "largest" for q in QUANTILES)],
                *(
                    [TITLES[name], *map(_number, report["quantiles"][name].values())]
                    for name in NOISE
                    if report["noise"]
                ),
            ]
        ),
        "",
        f"bad updates (A < 0, μ − π ≥ 0.5): {percent(report['bad_update_share'])} of tokens, before any region",
        "",
    ]
    for name, statistic in report["statistics"].items():
        rows = [["δ", *CURVES.values(), ""]]
        for point in statistic["curve"]:
            marks = [mark for mark in ("published", "floor", "recommended") if statistic[mark] == point["delta"]]
            rows.append([f"{point['delta']:g}", *(percent(point[key]) for key in CURVES), ", ".join(marks)])
        advice = "" if statistic["recommended"] is None else f"recommended δ: {statistic['recommended']:g}. "
        lines += [TITLES[name], *table(rows), *wrapped(f"{advice}{statistic['reason']}"), ""]
    return "\n".join(lines[:-1])


def _number(x: float | None) -> str:
    if x is None:
        return "inf"
    return f"≤ {x:g}" if x == GRID[0] else f"{x:g}"


def draw(counted: TokenCounts, report: Mapping[str, Any], file: Path) -> None:
    """Draws the curves over every threshold of the grid.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    need("matplotlib", extra="plots").use("Agg")
    plt = need("matplotlib.pyplot", extra="plots")
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), sharey=True)
    deltas = [delta for delta in GRID if 1e-5 <= delta <= 1.0]
    for axis, (name, statistic) in zip(axes, report["statistics"].items(), strict=True):
        points = curves(counted, name, deltas)
        for key, title in CURVES.items():
            heights = [max(share, LEAST) for point in points if (share := point[key]) is not None]
            if heights:  # either all points have it or none
                axis.plot(deltas, heights, LINES[key], color=COLOURS[key], label=title, linewidth=1.8)
        for mark, line in (("published", ":"), ("recommended", "-")):
            if statistic[mark] is not None:
                axis.axvline(statistic[mark], color="#555555", linestyle=line, linewidth=1, label=f"{mark} δ")
        axis.set(xscale="log", yscale="log", ylim=(LEAST, 1.5), xlabel=f"δ: {TITLES[name]}")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"share of tokens (at least {LEAST:g})")
    axes[0].legend(frameon=False, fontsize=8, loc="center left")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)

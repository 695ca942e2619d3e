"""Figures of the proxy study."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from proxy_data import KS, MODELS
from proxy_stats import RATES, at_rate, interval, pooled, primary

from trustrl.runner.figures import COLOURS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LABELS = {
    "log_r": "|log r|",
    "tv_binary": "Binary TV",
    "tv_1": "Top-1 TV",
    "tv_20": "Top-20 TV",
    "surprise": "−log μ(a), knows no policy",
    "tv_exact": "exact TV (the most possible)",
}
STYLES = {
    "log_r": (COLOURS[0], "-", "o"),
    "tv_binary": (COLOURS[1], "-", "s"),
    "tv_1": (COLOURS[3], "--", "v"),
    "tv_20": (COLOURS[2], "--", "^"),
    "surprise": (COLOURS[4], ":", "x"),
    "tv_exact": (COLOURS[7], ":", "."),
}


def draw(folder: Path) -> None:
    """Draws all figures."""
    for name, figure in (("ranks", ranks()), ("rates", rates()), ("tokens", tokens())):
        figure.savefig(folder / f"k-{name}.png", dpi=130)
        plt.close(figure)


def panels(height: float) -> tuple[Any, Any]:
    """Returns a figure with a panel for each model."""
    figure, axes = plt.subplots(1, len(MODELS), figsize=(9.6, height), sharey=True)
    for axis, name in zip(axes, MODELS, strict=True):
        axis.set_title(name, fontsize=10, loc="left")
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def ranks() -> Any:
    """Draws the rank correlation with the exact TV against K, with the sampled token's statistics as lines."""
    figure, axes = panels(3.6)
    for axis, name in zip(axes, MODELS, strict=True):
        found = np.array([interval(primary(name, "rank", f"tv_{k}")) for k in KS])
        axis.errorbar(
            KS, found[:, 0], yerr=np.abs(found[:, 1:].T - found[:, 0]), fmt="^-", color=COLOURS[2], markersize=4,
            capsize=2, label="Top-K TV",
        )  # fmt: skip
        for statistic in ("log_r", "tv_binary", "surprise"):
            colour, line, _ = STYLES[statistic]
            mean, low, high = interval(primary(name, "rank", statistic))
            axis.axhline(mean, color=colour, linestyle=line, label=LABELS[statistic])
            axis.axhspan(low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 4, 20, 64, 256, 1024], ["1", "4", "20", "64", "256", "1k"])
        axis.minorticks_off()
        axis.set_xlabel("K", fontsize=9)
    axes[0].set_ylabel("Spearman with exact TV", fontsize=9)
    axes[0].set_ylim(min(0.0, axes[0].get_ylim()[0]), 1.02)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def rates() -> Any:
    """Draws the mean exact TV of flagged tokens, as a multiple of the mean of all, against the matched rate."""
    figure, axes = panels(3.8)
    for axis, name in zip(axes, MODELS, strict=True):
        for at, (statistic, (colour, line, marker)) in enumerate(STYLES.items()):
            found = np.array([interval(at_rate(name, "none", 4, statistic, rate)["lift"]) for rate in RATES])
            axis.errorbar(
                np.array(RATES) * 100 * 1.03 ** (at - 2), found[:, 0], yerr=np.abs(found[:, 1:].T - found[:, 0]),
                fmt=marker + line, color=colour, markersize=4, capsize=2, linewidth=1.2, label=LABELS[statistic],
            )  # fmt: skip
        axis.axhline(1, color="#999999", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xticks([1, 2, 5, 10], ["1%", "2%", "5%", "10%"])
        axis.minorticks_off()
        axis.set_xlabel("share of tokens flagged", fontsize=9)
    axes[0].set_ylabel("mean TV of flagged ÷ mean TV", fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=6, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def tokens() -> Any:
    """Draws every token of SmolLM2: exact TV against |log r| and Binary TV, coloured by the sampler's probability."""
    d = pooled("smollm2-135m", "none", 4)
    order = np.random.default_rng(0).permutation(len(d["log_mu"]))
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.9), sharey=True)
    floor = 1e-4
    for axis, statistic in zip(axes, ("log_r", "tv_binary"), strict=True):
        points = axis.scatter(
            np.maximum(d[statistic], floor)[order], np.maximum(d["tv_exact"], floor)[order],
            c=np.maximum(d["log_mu"][order] / np.log(10), -4), s=4, cmap="viridis", linewidths=0,
        )  # fmt: skip
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(LABELS[statistic], fontsize=9)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    line = np.array([floor, 1])
    axes[0].plot(2 * line, line, color="#000000", linewidth=0.8, label="TV = |log r|/2")
    axes[1].plot(line, line, color="#000000", linewidth=0.8, label="TV = Binary TV, the lower bound")
    for axis in axes:
        axis.set_ylim(floor, 1)
        axis.legend(frameon=False, fontsize=8, loc="upper left")
    axes[0].set_ylabel("exact TV", fontsize=9)
    figure.tight_layout()
    bar = figure.colorbar(points, ax=axes, pad=0.01, ticks=[-4, -3, -2, -1, 0])
    bar.ax.set_yticklabels(["≤ 1e-4", "1e-3", "0.01", "0.1", "1"], fontsize=8)
    bar.set_label("μ(a)", fontsize=9)
    return figure

"""Noise quantiles, threshold curves, and the recommended threshold: the object behind `trustrl calibrate --json`.

`text` formats it for the terminal, and `draw` as a figure.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trustrl.config.statistics import Anchor
from trustrl.errors import MissingDataError
from trustrl.files import finite
from trustrl.optional_imports import need
from trustrl.tools.audit import TokenCounts, anchor_note, percent, share, table, wrapped
from trustrl.tools.calibrate.noise_counts import GRID, NOISE, STATISTICS, TOTALS

VERSION = 1
SHARE = 0.999
"""Share of the noise that a threshold must not mask."""

CONFIDENCE = 0.95
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
TITLES = {
    "tv": "binary TV |μ − π|", "kl": "binary KL, nats", "ratio": "|r − 1|, r = π/μ", "logp": "|Δ log p|, nats",
}  # fmt: skip
ROUND = (*(float(f"{digit}e{power}") for power in range(-4, 0) for digit in (1, 2, 5)), 1.0)
"""Thresholds at which the curves are listed."""

CURVES = {
    "noise": "noise above δ", "masked": "masked", "bad_left": "bad updates left", "certified": "certified",
}  # fmt: skip

COLOURS = {"noise": "#d55e00", "masked": "#0072b2", "bad_left": "#cc79a7", "certified": "#009e73"}
LINES = {"noise": "-", "masked": "--", "bad_left": ":", "certified": "-."}
AGAINST = {
    "proximal": "the recorded π'",
    "policy": "π, which equals π' there (the records have no proximal_logp)",
    "both": "the recorded π', or with π, equal there, where π' is null",
}
LEAST = 1e-5
"""Shares below this are drawn at the lower edge of the figure."""


def num_needed(quantile: float = SHARE, confidence: float = CONFIDENCE) -> int:
    """Returns the sample size at which the largest value lies above the quantile with this confidence.

    Example:
        >>> num_needed(0.999, 0.95)
        2995
    """
    return math.ceil(math.log(1 - confidence) / math.log(quantile))


def rank_above(num: int, quantile: float = SHARE, confidence: float = CONFIDENCE) -> int | None:
    """Returns the order statistic, from 1, that lies at or above the quantile with this confidence.

    The result holds for any distribution. It is

        the smallest k with P(Binomial(num, quantile) ≥ k) ≤ 1 − confidence

    or None if even the largest value does not reach the quantile.

    Example:
        >>> rank_above(2995), rank_above(2994)
        (2995, None)
    """
    chance = 1 - quantile
    mean = num * chance
    # Counts from the top how many values may lie above. 40 standard deviations below the mean, terms are negligible.
    above = max(0, int(mean - 40 * math.sqrt(mean)) - 1)
    total = 0.0
    while True:
        choose = math.lgamma(num + 1) - math.lgamma(above + 1) - math.lgamma(num - above + 1)
        total += math.exp(choose + above * math.log(chance) + (num - above) * math.log1p(-chance))
        if total > 1 - confidence:
            break
        above += 1
    return num - above + 1 if above else None


def value_at(bins: Sequence[int], rank: int) -> float:
    """Returns the rank-th smallest value, counted from 1 and rounded up to two digits."""
    below = 0
    for index, count in enumerate(bins):
        below += count
        if below >= rank:
            return GRID[index] if index < len(GRID) else math.inf
    raise IndexError(rank)


def num_above(bins: Sequence[int], delta: float) -> int:
    """Returns the number of values above δ, which must be on the grid."""
    return sum(bins[bisect_left(GRID, delta) + 1 :])


def calibration(counted: TokenCounts, anchor: Anchor = "behavior") -> dict[str, Any]:
    """Returns noise quantiles, threshold curves, and a recommended threshold for each statistic."""
    totals = dict(zip(TOTALS, counted.counts["totals"].tolist(), strict=True))
    if totals["unanchored"] == totals["rows"]:
        raise MissingDataError(
            "The records must contain behavior_logp to compare sampler and trainer, got none. Record with a region "
            "that is anchored on the sampler, or with both anchors."
        )
    noise = dict(zip(NOISE, counted.counts["noise"].tolist(), strict=True))
    num = totals["noise"]
    against = "proximal" if totals["proximal"] == totals["first"] else "both" if totals["proximal"] else "policy"
    return {
        "version": VERSION,
        **totals,
        "anchor": anchor,
        "against": against,
        "needed": num_needed(),
        "quantiles": {
            name: {f"{q:g}": finite(value_at(bins, max(1, math.ceil(q * num)))) if num else None for q in QUANTILES}
            for name, bins in noise.items()
        },
        "bad_update_share": share(totals["bad"], totals["measured"]),
        "statistics": {name: _statistic(name, counted, totals, noise[name]) for name in STATISTICS},
    }


def _statistic(name: str, counted: TokenCounts, totals: dict[str, int], noise: list[int]) -> dict[str, Any]:
    published = STATISTICS[name].bounds[1]
    rank = rank_above(totals["noise"])
    floor = None if rank is None else finite(value_at(noise, rank))
    recommended = None if floor is None else max(floor, published)
    (there,) = curves(counted, name, [recommended or published])
    shown = {*ROUND, *(delta for delta in (published, floor, recommended) if delta is not None)}
    return {
        "published": published,
        "floor": floor,
        "recommended": recommended,
        "infinite": share(noise[-1], totals["noise"]),
        "reason": _reason(name, totals["noise"], noise[-1], floor, published, there),
        "curve": curves(counted, name, sorted(shown)),
    }


def curves(counted: TokenCounts, name: str, deltas: Sequence[float]) -> list[dict[str, float | None]]:
    """Returns the effect of each threshold.

    `noise`: share of the noise above δ. `masked`: masked tokens / tokens with A ≠ 0. `bad_left`: unmasked bad updates /
    measured tokens. `certified`: share of tokens whose full-vocabulary divergence is known to lie on one side of δ;
    None for the ratio, which does not bound a divergence.
    """
    index = list(STATISTICS).index(name)
    totals = dict(zip(TOTALS, counted.counts["totals"].tolist(), strict=True))
    outward, bad, lower, upper = (counted.counts[key][index].tolist() for key in ("outward", "bad", "lower", "upper"))
    noise = counted.counts["noise"][NOISE.index(name)].tolist()
    points = []
    for delta in deltas:
        decided = num_above(lower, delta) + totals["measured"] - num_above(upper, delta)
        points.append(
            {
                "delta": delta,
                "noise": share(num_above(noise, delta), totals["noise"]),
                "masked": share(num_above(outward, delta), totals["signed"]),
                "bad_left": share(totals["bad"] - num_above(bad, delta), totals["measured"]),
                "certified": None if name == "ratio" else share(decided, totals["measured"]),
            }
        )
    return points


def _reason(
    name: str, num: int, infinite: int, floor: float | None, published: float, there: dict[str, float | None]
) -> str:
    if num < num_needed():
        return (
            f"No recommendation: bounding the {100 * SHARE:g}% quantile at {100 * CONFIDENCE:g}% confidence takes "
            f"{num_needed():,} tokens from before the first update, got {num:,}."
        )
    if floor is None:
        return (
            f"No recommendation: the noise is infinite at {100 * infinite / num:.3g}% of tokens, which every threshold "
            "masks. Sampler and trainer use different distributions. Run `trustrl probe` to find the cause."
        )
    masked = "no tokens" if not there["masked"] else f"{100 * there['masked']:.2g}% of the tokens with A ≠ 0"
    sure = f"{100 * SHARE:g}% of the noise is at most {floor:g} ({100 * CONFIDENCE:g}% confidence)"
    if floor <= published:
        return f"{sure}, so the published {published:g} does not mask it; it would mask {masked} here."
    reason = f"{sure}, above the published {published:g}, which would mask noise; {floor:g} would mask {masked} here."
    if name == "tv" and floor >= 0.5:
        reason += " This also allows updates that destroy likely tokens, so fix the sampler first."
    return reason


def text(report: Mapping[str, Any]) -> str:
    """Formats the noise, the effect of thresholds, and the recommendation for the terminal."""
    lines = [
        f"{report['rows']:,} tokens × updates; noise from {report['noise']:,} tokens of {report['sequences']:,} "
        "sequences before",
        "their first update: "
        + (f"μ compared with {AGAINST[report['against']]}" if report["anchor"] == "behavior" else "π' compared with π"),
        *wrapped(anchor_note(report["anchor"])),
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

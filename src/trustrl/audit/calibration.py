"""From counts of noise to a threshold that leaves it alone, and why: the object behind `trustrl calibrate --json`."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from trustrl.audit.noise import GRID, NOISE, STATISTICS, TOTALS
from trustrl.audit.report import share
from trustrl.audit.summary import Summary
from trustrl.errors import MissingDataError

VERSION = 1
SHARE = 0.999
"""Of the noise that a threshold must leave unmasked."""

CONFIDENCE = 0.95
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
TITLES = {
    "tv": "binary TV |μ − π|", "kl": "binary KL, nats", "ratio": "|r − 1|, r = π/μ", "logp": "|Δ log p|, nats",
}  # fmt: skip
ROUND = (*(float(f"{digit}e{power}") for power in range(-4, 0) for digit in (1, 2, 5)), 1.0)
"""Thresholds at which curves are told."""

CURVES = {
    "noise": "noise above δ", "masked": "stopped", "bad_left": "bad updates left", "certified": "certified",
}  # fmt: skip


def num_needed(quantile: float = SHARE, confidence: float = CONFIDENCE) -> int:
    """How many values it takes for the largest of them to lie above the quantile with this confidence.

    Example:
        >>> num_needed(0.999, 0.95)
        2995
    """
    return math.ceil(math.log(1 - confidence) / math.log(quantile))


def rank_above(num: int, quantile: float = SHARE, confidence: float = CONFIDENCE) -> int | None:
    """Which order statistic, from 1, lies at or above the quantile with this confidence, whatever the distribution.

        the smallest k with P(Binomial(num, quantile) ≥ k) ≤ 1 − confidence

    None where even the largest does not.

    Example:
        >>> rank_above(2995), rank_above(2994)
        (2995, None)
    """
    mean = num * (1 - quantile)
    # Counted from the top: how many may lie above. 40 standard deviations below the mean there is nothing to add.
    above = max(0, int(mean - 40 * math.sqrt(mean)) - 1)
    total = 0.0
    while True:
        total += math.exp(_log_binomial(num, above, 1 - quantile))
        if total > 1 - confidence:
            break
        above += 1
    return num - above + 1 if above else None


def _log_binomial(num: int, hits: int, chance: float) -> float:
    choose = math.lgamma(num + 1) - math.lgamma(hits + 1) - math.lgamma(num - hits + 1)
    return choose + hits * math.log(chance) + (num - hits) * math.log1p(-chance)


def value_at(bins: Sequence[int], rank: int) -> float:
    """The rank-th smallest value, from 1, rounded up to two digits."""
    below = 0
    for at, count in enumerate(bins):
        below += count
        if below >= rank:
            return GRID[at] if at < len(GRID) else math.inf
    raise IndexError(rank)


def num_above(bins: Sequence[int], delta: float) -> int:
    """How many lie above δ, a number of the grid."""
    return sum(bins[bisect_left(GRID, delta) + 1 :])


def calibration(summary: Summary) -> dict[str, Any]:
    """Quantiles of the noise, curves over thresholds, and a recommended threshold of each statistic.

    Raises:
        MissingDataError: no row has the sampler's log-prob.
    """
    totals = dict(zip(TOTALS, summary.counts["totals"].tolist(), strict=True))
    if totals["unanchored"] == totals["rows"]:
        raise MissingDataError(
            "behavior_logp must be in the records: noise is what lies between sampler and trainer, got none. Record "
            "with a region that is anchored on the sampler, or with both anchors."
        )
    noise = dict(zip(NOISE, summary.counts["noise"].tolist(), strict=True))
    num = totals["noise"]
    against = "proximal" if totals["proximal"] == totals["first"] else "both" if totals["proximal"] else "policy"
    return {
        "version": VERSION,
        **totals,
        "against": against,
        "needed": num_needed(),
        "quantiles": {
            name: {f"{q:g}": _finite(value_at(bins, max(1, math.ceil(q * num)))) if num else None for q in QUANTILES}
            for name, bins in noise.items()
        },
        "bad_update_share": share(totals["bad"], totals["measured"]),
        "statistics": {name: _statistic(name, summary, totals, noise[name]) for name in STATISTICS},
    }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _statistic(name: str, summary: Summary, totals: dict[str, int], noise: list[int]) -> dict[str, Any]:
    published = STATISTICS[name].bounds[1]
    rank = rank_above(totals["noise"])
    floor = None if rank is None else _finite(value_at(noise, rank))
    recommended = None if floor is None else max(floor, published)
    (there,) = curves(summary, name, [recommended or published])
    shown = {*ROUND, *(delta for delta in (published, floor, recommended) if delta is not None)}
    return {
        "published": published,
        "floor": floor,
        "recommended": recommended,
        "infinite": share(noise[-1], totals["noise"]),
        "reason": _reason(name, totals["noise"], noise[-1], floor, published, there),
        "curve": curves(summary, name, sorted(shown)),
    }


def curves(summary: Summary, name: str, deltas: Sequence[float]) -> list[dict[str, float | None]]:
    """What each threshold would do.

    `noise`: share of the noise above δ. `masked`: tokens stopped / tokens with A ≠ 0. `bad_left`: bad updates that are
    not stopped / measured tokens. `certified`: tokens whose divergence over the whole vocabulary is known to be on one
    side of δ; None for the ratio, which bounds none.
    """
    at = list(STATISTICS).index(name)
    totals = dict(zip(TOTALS, summary.counts["totals"].tolist(), strict=True))
    outward, bad, lower, upper = (summary.counts[key][at].tolist() for key in ("outward", "bad", "lower", "upper"))
    noise = summary.counts["noise"][NOISE.index(name)].tolist()
    found = []
    for delta in deltas:
        decided = num_above(lower, delta) + totals["measured"] - num_above(upper, delta)
        found.append(
            {
                "delta": delta,
                "noise": share(num_above(noise, delta), totals["noise"]),
                "masked": share(num_above(outward, delta), totals["signed"]),
                "bad_left": share(totals["bad"] - num_above(bad, delta), totals["measured"]),
                "certified": None if name == "ratio" else share(decided, totals["measured"]),
            }
        )
    return found


def _reason(
    name: str, num: int, infinite: int, floor: float | None, published: float, there: dict[str, float | None]
) -> str:
    if num < num_needed():
        return (
            f"No recommendation: a bound on the {100 * SHARE:g} % quantile at {100 * CONFIDENCE:g} % confidence needs "
            f"{num_needed():,} tokens from before the first update, got {num:,}."
        )
    if floor is None:
        return (
            f"No recommendation: at {100 * infinite / num:.3g} % of tokens the noise is endless, and no threshold "
            "leaves such tokens alone. Sampler and trainer do not mean the same distribution: `trustrl probe` says why."
        )
    masked = "nothing" if not there["masked"] else f"{100 * there['masked']:.2g} % of tokens with A ≠ 0"
    sure = f"{100 * SHARE:g} % of the noise lies at or below {floor:g} ({100 * CONFIDENCE:g} % sure)"
    if floor <= published:
        return f"{sure}, so the published {published:g} leaves it alone; it would stop {masked} here."
    also = (
        " That also lets likely tokens be destroyed: mend the sampler first." if name == "tv" and floor >= 0.5 else ""
    )
    return (
        f"{sure}, above the published {published:g}, which would stop noise; {floor:g} would stop {masked} here.{also}"
    )

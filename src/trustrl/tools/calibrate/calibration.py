"""The object behind `trustrl calibrate --json`: noise quantiles, threshold curves, and the recommended threshold."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from trustrl.errors import MissingDataError
from trustrl.tools.audit import TokenCounts, share
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
    mean = num * (1 - quantile)
    # Counts from the top how many values may lie above. 40 standard deviations below the mean, terms are negligible.
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


def calibration(counted: TokenCounts) -> dict[str, Any]:
    """Returns noise quantiles, threshold curves, and a recommended threshold for each statistic.

    Raises:
        MissingDataError: If no row has the sampler's log-prob.
    """
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
        "against": against,
        "needed": num_needed(),
        "quantiles": {
            name: {f"{q:g}": _finite(value_at(bins, max(1, math.ceil(q * num)))) if num else None for q in QUANTILES}
            for name, bins in noise.items()
        },
        "bad_update_share": share(totals["bad"], totals["measured"]),
        "statistics": {name: _statistic(name, counted, totals, noise[name]) for name in STATISTICS},
    }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _statistic(name: str, counted: TokenCounts, totals: dict[str, int], noise: list[int]) -> dict[str, Any]:
    published = STATISTICS[name].bounds[1]
    rank = rank_above(totals["noise"])
    floor = None if rank is None else _finite(value_at(noise, rank))
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
    also = (
        " This also allows updates that destroy likely tokens, so fix the sampler first."
        if name == "tv" and floor >= 0.5
        else ""
    )
    return (
        f"{sure}, above the published {published:g}, which would mask noise; {floor:g} would mask {masked} here.{also}"
    )

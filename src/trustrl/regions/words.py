"""Phrases that regions describe themselves with: measures, bounds, caps and units."""

import math

from trustrl.config.axes import Region
from trustrl.config.statistics import Divergence, Statistic

MEASURES = {
    "ratio": ("|π/{b} − 1|", "ratio"),
    "log-ratio": ("|log π/{b}|", "nats"),
    "sequence-ratio": ("|s − 1|, s the geometric mean of π/{b} over the sequence,", "ratio"),
    "sampled-k2": ("½ log² π/{b}", "nats"),
    "sampled-k3": ("π/{b} − 1 − log π/{b}", "nats"),
    "binary-tv": ("|π − {b}| of the sampled token", "probability"),
    "binary-kl": ("the sampled token's binary KL({b}‖π)", "nats"),
    "symmetric-binary-kl": ("the larger of the sampled token's two binary KLs", "nats"),
    "topk-tv": ("TV over the {k} most probable tokens of {b}", "probability"),
    "topk-kl": ("KL({b}‖π) over the {k} most probable tokens of {b}", "nats"),
    "full-tv": ("TV over the whole vocabulary", "probability"),
    "full-kl": ("KL({b}‖π) over the whole vocabulary", "nats"),
}
"""Quantity that each statistic measures, where b is the anchor, and its unit."""


def number(x: float) -> str:
    """Formats a number with four significant digits."""
    return "∞" if x == math.inf else f"{x:.4g}"


def anchor_of(region: Region | None) -> str:
    """Returns the symbol of the region's anchor policy."""
    return "π'" if region is not None and region.needs().anchor == "proximal" else "μ"


def measure_in_words(statistic: Statistic, b: str) -> tuple[str, str]:
    """Returns the quantity that a statistic measures, and its unit."""
    what, unit = MEASURES.get(statistic.kind, (statistic.kind, "the statistic's unit"))
    return what.format(b=b, k=getattr(statistic, "k", "")), unit


def bounds_in_words(statistic: Statistic) -> str:
    """Returns the bounds: one number if both are equal."""
    low, high = statistic.bounds
    return number(high) if low == high else f"{number(high)} upwards or {number(low)} downwards"


def beyond(statistic: Statistic, b: str) -> str:
    """Returns the condition of a token outside the bounds."""
    what, unit = measure_in_words(statistic, b)
    end = "the upper end of " if isinstance(statistic, Divergence) and statistic.act_on == "upper" else ""
    return f"{end}{what} exceeds {bounds_in_words(statistic)} ({unit})"


def capped(max_ratio: float | None, b: str) -> str:
    """Returns the sentence about a cap on the weight; empty without a cap."""
    return "" if max_ratio is None else f" Weights π/{b} are capped at {number(max_ratio)}."

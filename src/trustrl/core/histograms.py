"""Bins of the histograms that metrics are computed from, and quantiles read from them. Loads without torch."""

import math

MANTISSA_BITS, SMALLEST_EXPONENT, LARGEST_EXPONENT = 3, -27, 10
FIRST_BIN = ((SMALLEST_EXPONENT + 127) << MANTISSA_BITS) - 1
HALF = (LARGEST_EXPONENT - SMALLEST_EXPONENT) << MANTISSA_BITS
NUM_BINS = 2 * HALF + 1
"""Histogram bins: one around 0, then 8 per power of two from 2⁻²⁷ (7e-9) to 2¹⁰ on each side. The outermost are
open."""

PROBABILITY_EDGES = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99)
"""Edges of the anchor-probability bins. The first and the last bin are open."""

STALENESS_EDGES = (1.0, 2.0, 3.0, 5.0, 9.0, 17.0)
"""Edges of the staleness bins, in weight versions: 0 | 1 | 2 | 3-4 | 5-8 | 9-16 | 17 and more."""


def quantile(bins: list[float], share: float) -> float:
    """Returns the value below which this share of a histogram lies, to the width of a bin (at most 12.5%).

    Examples:
        >>> bins = [0.0] * NUM_BINS
        >>> bins[HALF] = 1.0
        >>> quantile(bins, 0.5)
        0.0
    """
    total = sum(bins)
    if not total:
        raise ZeroDivisionError
    wanted, below = share * total, 0.0
    for index, count in enumerate(bins):
        if count and below + count >= wanted:
            part = (wanted - below) / count
            return _inside_bin(index - HALF, part if index > HALF else 1 - part)
        below += count
    return _inside_bin(HALF, 1.0)


def _inside_bin(step: int, part: float) -> float:
    """Interpolates between the bin's edge nearer to 0 (part 0) and its other edge (part 1)."""
    if step == 0:
        return 0.0
    low, high = (_edge(abs(step) - 1 + more) for more in (0, 1))
    return math.copysign(low + part * (high - low), step)


def _edge(index: int) -> float:
    octave, eighth = divmod(index, 1 << MANTISSA_BITS)
    return 2.0 ** (SMALLEST_EXPONENT + octave) * (1 + eighth / (1 << MANTISSA_BITS))


def bin_names(prefix: str, edges: tuple[float, ...]) -> list[str]:
    """Returns the names of the bins between these edges. The first and the last bin are open."""
    return [f"{prefix}_below_{edges[0]:g}", *(f"{prefix}_from_{edge:g}" for edge in edges)]

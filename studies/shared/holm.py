"""Holm's correction for the comparisons on one page."""

from collections.abc import Sequence

LEVEL = 0.05


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p values adjusted for having made all these comparisons, in the order given.

    The smallest is multiplied by their number m, the next by m − 1, and so on. No result is below the previous one.

    Example:
        >>> holm([0.5, 0.01, 0.25])
        [0.5, 0.03, 0.5]
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = highest
    return adjusted

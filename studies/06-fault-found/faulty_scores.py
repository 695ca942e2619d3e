"""Faults of the reward function, on TRL and on verl. Loads nothing else."""

import random
from collections.abc import Mapping
from typing import Any

SCORES = frozenset({"inf_share", "nan_share", "none_every", "zeros", "reward"})
"""Names of these faults."""


def faulty_score(
    score: float, text: str, fault: Mapping[str, Any], batch: int, batches: int, draw: random.Random
) -> float | None:
    """Returns the score of one completion of a batch, which counts from 0, in a run of `batches`."""
    if fault.get("reward") == "constant" and batch >= fault["after"] * batches:
        return 0.0
    if "none_every" in fault and batch % fault["none_every"] == fault["none_every"] - 1:
        return None
    if "zeros" in fault:
        return max(score, fault["zeros"] * text.count("0") / max(1, len(text)))
    for name, value in (("inf_share", float("inf")), ("nan_share", float("nan"))):
        if draw.random() < fault.get(name, 0.0):
            return value
    return score

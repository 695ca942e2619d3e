"""Certified interval around an exact divergence."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class Interval(NamedTuple):
    """lower ≤ exact divergence ≤ upper, per token."""

    lower: Float[Tensor, "*batch"]
    upper: Float[Tensor, "*batch"]


def point(value: Float[Tensor, "*batch"]) -> Interval:
    """Returns an interval of width 0, for a quantity that is known exactly."""
    return Interval(value, value)

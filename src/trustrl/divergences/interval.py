"""A certified interval: both ends are computed, and the exact divergence lies between them."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class Interval(NamedTuple):
    """lower ≤ exact divergence ≤ upper, per token."""

    lower: Float[Tensor, "*batch"]
    upper: Float[Tensor, "*batch"]


def point(value: Float[Tensor, "*batch"]) -> Interval:
    """An interval of width 0: a quantity that is known exactly."""
    return Interval(value, value)

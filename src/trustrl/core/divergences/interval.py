"""Certified interval around an exact divergence."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Interval(NamedTuple):
    """lower ≤ exact divergence ≤ upper, per token."""

    lower: Float[Tensor, "*batch"]
    upper: Float[Tensor, "*batch"]


def point(value: Float[Tensor, "*batch"]) -> Interval:
    """Returns an interval of width 0, for a quantity that is known exactly."""
    return Interval(value, value)


def tv_limit(kl: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Returns the largest TV of two distributions with this KL, in either direction.

        TV ≤ min( √(KL/2), √(1 − e^−KL) )

    The first inequality is Pinsker's, the smaller one up to KL = 1.59; the second is Bretagnolle and Huber's.

    Example:
        >>> tv_limit(torch.tensor(0.02))
        tensor(0.1000)
    """
    return torch.minimum(kl / 2, -torch.expm1(-kl)).sqrt()

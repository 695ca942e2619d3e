"""Names for sequences, and which of them are written: both the same on every rank, at every update, in every run."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_SALT = 0x5EED
_BITS = 53


def sequence_ids(*, step: int, rollout: int, rank: int, count: int) -> Int[Tensor, " count"]:
    """One number ≥ 0 for each sequence of a rollout, unique in a run but for the chance of 63 random bits.

    Args:
        step: at which the rollout was drawn; a resumed run goes on with new numbers.
        rollout: which one of this step, from 0.
        rank: of the process that trains on them.
        count: how many.
    """
    key = torch.zeros(1, dtype=torch.int64)
    for part in (step, rollout, rank):
        key = _mixed(key + part + 1)
    return _mixed(key + torch.arange(count)) & 0x7FFF_FFFF_FFFF_FFFF


def is_sampled(sequences: Int[Tensor, "*n"], share: float) -> Bool[Tensor, "*n"]:
    """True on about this share of the sequences, always the same ones; a larger share contains a smaller one's.

    Example:
        >>> is_sampled(torch.arange(10_000), 0.01).sum()
        tensor(104)
    """
    return _shifted(_mixed(sequences ^ _SALT), 64 - _BITS) < round(share * 2**_BITS)


def _mixed(x: Tensor) -> Tensor:
    """splitmix64's finaliser: every bit of x reaches every bit of the result."""
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9, signed
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB, signed
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, with zeros: torch's own shift would copy the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)

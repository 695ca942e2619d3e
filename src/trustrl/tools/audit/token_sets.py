"""Counts of overlapping sets of tokens: their sizes, their overlaps, and their sizes by bin."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_MAX_BITS = 12
"""Number of sets up to which every combination has a number. With more sets, only combinations that occur have one."""


class TokenSets:
    """Sets of tokens as one number per token: the combination of sets that contain it.

    A histogram of that number holds every size and overlap, so the tokens are read once, however many sets there are.
    """

    def __init__(self, sets: Sequence[Bool[Tensor, " n"]]) -> None:
        self._sets = sets
        num = len(sets)
        if num <= _MAX_BITS:
            dtype = torch.uint8 if num <= 8 else torch.int32
            self._combination = torch.zeros(len(sets[0]), dtype=dtype)
            for bit, flags in enumerate(sets):
                self._combination |= flags.to(dtype) << bit
            members = torch.arange(2**num) >> torch.arange(num).unsqueeze(1) & 1
        else:
            members, self._combination = torch.stack(list(sets)).unique(dim=1, return_inverse=True)
        self._combination = self._combination.int()
        self._members = members.double()  # exact up to 2^53 tokens, and faster to multiply than integers

    def overlaps(self) -> Int[Tensor, "s s"]:
        """Returns the number of tokens in both sets of each pair. The diagonal holds the sizes."""
        sizes = torch.bincount(self._combination, minlength=self._members.shape[1])
        return ((self._members * sizes) @ self._members.T).long()

    def by_bin(self, place: Int[Tensor, " n"], num_bins: int) -> Int[Tensor, "s b"]:
        """Returns the number of tokens of each set in each bin, from the bin of each token."""
        num = self._members.shape[1]
        if num * num_bins > max(len(place), 2**16):  # many bins, as for token ids: one histogram per set
            places = [place.index_select(0, flags.nonzero().squeeze(1)) for flags in self._sets]
            return torch.stack([torch.bincount(x, minlength=num_bins) for x in places])
        joint = torch.bincount(place.int() * num + self._combination, minlength=num_bins * num)
        return (self._members @ joint.view(num_bins, num).double().T).long()

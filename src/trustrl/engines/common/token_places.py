"""The tokens of a padded batch that a region reads, as one packed row.

B: sequences, T: padded length, N: tokens. Trainers pad their own tensors to (B, T). Wider data, such as K ids for each
token, exists only for the N tokens: it travels as one tensor per sequence and is joined to (N, K).
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor


class TokenPlaces(NamedTuple):
    """The places of N tokens in a (B, T) batch, sequence by sequence."""

    row: Tensor
    """(N,): the sequence of each token."""

    column: Tensor
    """(N,): its position in the sequence."""

    flat: Tensor
    """(N,): its place among all B · T."""

    shape: torch.Size
    """(B, T)."""

    @classmethod
    def of_mask(cls, mask: Tensor) -> Self:
        """Returns the places where a (B, T) mask is True. Waits for the device, to learn their number."""
        row, column = mask.nonzero(as_tuple=True)
        return cls(row, column, row * mask.shape[1] + column, mask.shape)

    @classmethod
    def of_columns(cls, columns: Sequence[Tensor], shape: torch.Size) -> Self:
        """Returns the places of tokens whose positions are known for each sequence. Does not wait for the device."""
        every = torch.arange(len(columns), device=columns[0].device)
        row = torch.cat([number.expand(len(column)) for number, column in zip(every, columns, strict=True)])
        column = torch.cat(list(columns))
        return cls(row, column, row * shape[1] + column, shape)

    @classmethod
    def everywhere(cls, mask: Tensor) -> Self:
        """Returns all B · T places of a (B, T) mask, True or not. Does not wait for the device."""
        flat = torch.arange(mask.numel(), device=mask.device)
        return cls(flat // mask.shape[1], flat % mask.shape[1], flat, mask.shape)

    def of(self, x: Tensor | Sequence[Tensor]) -> Tensor:
        """Returns the tokens' values, (N, ...), of (B, T, ...) or of one tensor per sequence that holds only them."""
        if not isinstance(x, Tensor):
            return torch.cat(list(x))
        return x.flatten(0, 1).index_select(0, self.flat)

    def of_rows(self, x: Tensor) -> Tensor:
        """Returns the tokens' values of one per sequence, (B,) or (B, 1), or of one per token, (B, T)."""
        return self.of(x) if x.shape == self.shape else x.reshape(-1).index_select(0, self.row)

    def states(self, last_hidden: Tensor) -> Tensor:
        """Returns the hidden states that predict the tokens, (N, D), of (B, L, D) for prompts and the T last tokens."""
        length = last_hidden.shape[1]
        before = length - self.shape[1] - 1
        return last_hidden.flatten(0, 1).index_select(0, self.row * length + self.column + before)

    def padded(self, x: Tensor) -> Tensor:
        """Returns (N,) as (B, T) with 0 elsewhere, with gradient."""
        return x.new_zeros(self.shape.numel()).index_copy(0, self.flat, x).view(self.shape)

    def split(self, x: Tensor) -> list[Tensor]:
        """Returns (N, ...) as one tensor per sequence. Waits for the device, to learn their lengths."""
        return list(x.split(torch.bincount(self.row, minlength=self.shape[0]).tolist()))

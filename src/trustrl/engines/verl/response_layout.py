"""Layouts of a micro-batch's response tokens: packed or padded for the model, (B, R) for the loss.

verl keeps responses as nested tensors with one row per sequence. Tests and older callers pad them on the right.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from trustrl.errors import EngineError


class Places(NamedTuple):
    """The N tokens in the loss of one micro-batch, and the positions of the states that predict them."""

    in_loss: Tensor
    """(B, R): True on the N tokens."""

    at: tuple[Tensor, Tensor]
    """(N,) twice: the row and the column of each token there. Only finding N waits for the device."""

    packed: Tensor
    """(N,): positions of their states among all tokens of the micro-batch, prompts included, sequence by sequence."""

    offsets: Tensor
    """(B + 1,): the position where each sequence begins there."""

    num_packed: int
    """The number of all tokens of the micro-batch."""

    def states(self, last_hidden: Tensor) -> Tensor:
        """Selects the states: (B, L, D) or packed (1, L, D) → (N, D)."""
        if len(last_hidden) == 1:
            return last_hidden[0, self.packed]
        rows = self.at[0]
        return last_hidden[rows, self.packed - self.offsets[rows]]

    def rows(self, x: Tensor) -> Tensor:
        """Selects the tokens: (B, R, ...) → (N, ...)."""
        return x[self.at]

    def padded(self, x: Tensor, fill: float = 0) -> Tensor:
        """Scatters tokens to responses, with gradient: (N, ...) → (B, R, ...)."""
        out = x.new_full((*self.in_loss.shape, *x.shape[1:]), fill)
        return out.index_put(self.at, x)

    def as_model_output(self, x: Tensor) -> Tensor:
        """Scatters tokens to a nested tensor with one value per token, as verl's models return log-probs.

        Values outside the loss are 0.
        """
        out = x.new_zeros(self.num_packed).index_put((self.packed,), x)
        return torch.nested.nested_tensor_from_jagged(out, self.offsets)


def places(data: Any) -> Places:
    """Returns the tokens in the loss of one micro-batch."""
    in_loss = padded(data["response_mask"]).bool()
    row, column = in_loss.nonzero(as_tuple=True)
    offsets, num_packed = data["input_ids"].offsets(), len(data["input_ids"].values())
    if data["responses"].is_nested:
        # The state before a token predicts it, and a sequence ends with its response.
        packed = (offsets[1:] - data["responses"].offsets().diff() - 1)[row] + column
    else:
        packed = no_padding_2_padding(torch.arange(num_packed, device=in_loss.device), data)[row, column]
    return Places(in_loss, (row, column), packed, offsets, num_packed)


def padded(x: Any, fill: float = 0) -> Tensor:
    """Pads a tensor over responses to (B, R, ...), unless it is already padded."""
    if not x.is_nested:
        return x
    return _laid_out(x, x.offsets().diff(), _longest(x), fill)


def _longest(x: Any) -> int:
    """Returns the length of the longest row of a nested tensor. Waits for the device, unless torch knows it already."""
    return x._get_max_seqlen()


def _laid_out(x: Any, lengths: Tensor, width: int, fill: float) -> Tensor:
    """Returns the first `lengths` entries of each row of a nested tensor as (B, width, ...), without waiting."""
    values, column = x.values(), torch.arange(width, device=lengths.device)
    if not len(values):
        return values.new_full((len(lengths), width, *values.shape[1:]), fill)
    there = (column < lengths.unsqueeze(1)).reshape(len(lengths), width, *[1] * (values.ndim - 1))
    at = (x.offsets()[:-1].unsqueeze(1) + column).clamp(max=len(values) - 1)
    return torch.where(there, values[at], values.new_full((), fill))


def check_rows(x: Any, data: Any) -> None:
    """Raises if a sequence in the loss has more or fewer rows in `x` than response tokens. Waits for the device.

    Raises:
        EngineError: If one has; names the numbers.
    """
    if not x.is_nested:
        return
    found, lengths = x.offsets().diff(), data["responses"].offsets().diff()
    wrong = padded(data["response_mask"]).bool().any(-1) & (found != lengths)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise EngineError(
            "The sampler's distribution must have one row for each response token, got "
            f"{int(found[row])} rows for {int(lengths[row])} tokens. Record it with one of trustrl's agent loops."
        )


def aligned_with_responses(x: Any, data: Any, fill: float = 0) -> Tensor:
    """Pads a tensor from the rollout, with one row per response token, to (B, R, ...).

    A sequence without tokens in the loss may have any number of rows and is filled with `fill`: verl pads short batches
    with a synthetic sample of 1 response token and 128 rows. `check_rows` has checked the others.
    """
    if not x.is_nested:
        return x
    in_loss = padded(data["response_mask"]).bool().any(-1)
    lengths = torch.where(in_loss, data["responses"].offsets().diff(), 0)
    return _laid_out(x, lengths, _longest(data["responses"]), fill)


def like_responses(x: Tensor, data: Any) -> Tensor:
    """Returns (B, R, ...) as a nested tensor if the micro-batch's responses are nested, like verl's own fields."""
    mask = data["response_mask"]
    if not mask.is_nested:
        return x
    offsets, num_tokens = mask.offsets(), len(mask.values())
    rows = torch.arange(len(x), device=x.device)
    row = torch.repeat_interleave(rows, offsets.diff(), output_size=num_tokens)
    column = torch.arange(num_tokens, device=x.device) - offsets[row]
    return torch.nested.nested_tensor_from_jagged(x[row, column], offsets)

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

    packed: Tensor
    """(N,): positions of their states among all tokens of the micro-batch, prompts included, sequence by sequence."""

    offsets: Tensor
    """(B + 1,): the position where each sequence begins there."""

    def states(self, last_hidden: Tensor) -> Tensor:
        """Selects the states: (B, L, D) or packed (1, L, D) → (N, D)."""
        if len(last_hidden) == 1:
            return last_hidden[0, self.packed]
        rows = self.in_loss.nonzero()[:, 0]
        return last_hidden[rows, self.packed - self.offsets[rows]]

    def rows(self, x: Tensor) -> Tensor:
        """Selects the tokens: (B, R, ...) → (N, ...)."""
        return x[self.in_loss]

    def padded(self, x: Tensor, fill: float = 0) -> Tensor:
        """Scatters tokens to responses, with gradient: (N, ...) → (B, R, ...)."""
        out = x.new_full((*self.in_loss.shape, *x.shape[1:]), fill)
        return out.index_put((self.in_loss,), x)

    def as_model_output(self, x: Tensor) -> Tensor:
        """Scatters tokens to a nested tensor with one value per token, as verl's models return log-probs.

        Values outside the loss are 0.
        """
        out = x.new_zeros(int(self.offsets[-1])).index_put((self.packed,), x)
        return torch.nested.nested_tensor_from_jagged(out, self.offsets)


def places(data: Any) -> Places:
    """Returns the tokens in the loss of one micro-batch."""
    in_loss = padded(data["response_mask"]).bool()
    offsets = data["input_ids"].offsets()
    every = torch.arange(len(data["input_ids"].values()), device=in_loss.device)
    return Places(in_loss, no_padding_2_padding(every, data)[in_loss], offsets)


def padded(x: Any, fill: float = 0) -> Tensor:
    """Pads a tensor over responses to (B, R, ...), unless it is already padded."""
    if not x.is_nested:
        return x
    values, lengths = x.values(), x.offsets().diff()
    there = torch.arange(int(lengths.max()), device=values.device) < lengths.unsqueeze(1)
    out = values.new_full((*there.shape, *values.shape[1:]), fill)
    out[there] = values
    return out


def aligned_with_responses(x: Any, data: Any, fill: float = 0) -> Tensor:
    """Pads a tensor from the rollout, with one row per response token, to (B, R, ...).

    A sequence without tokens in the loss may have any number of rows and is filled with `fill`: verl pads short batches
    with a synthetic sample of 1 response token and 128 rows.

    Raises:
        EngineError: If a sequence in the loss has more or fewer rows than response tokens.
    """
    if not x.is_nested:
        return x
    found, lengths = x.offsets().diff(), data["responses"].offsets().diff()
    in_loss = padded(data["response_mask"]).bool().any(-1)
    wrong = in_loss & (found != lengths)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise EngineError(
            "The sampler's distribution must have one row for each response token, got "
            f"{int(found[row])} rows for {int(lengths[row])} tokens. Record it with one of trustrl's agent loops."
        )
    kept = torch.where(in_loss, lengths, 0)
    there = torch.arange(int(lengths.max()), device=kept.device) < kept.unsqueeze(1)
    out = x.values().new_full((*there.shape, *x.values().shape[1:]), fill)
    out[there] = x.values()[torch.repeat_interleave(in_loss, found)]
    return out


def like_responses(x: Tensor, data: Any) -> Tensor:
    """Returns (B, R, ...) as a nested tensor if the micro-batch's responses are nested, like verl's own fields."""
    mask = data["response_mask"]
    if not mask.is_nested:
        return x
    lengths = mask.offsets().diff()
    there = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
    return torch.nested.nested_tensor_from_jagged(x[there], mask.offsets())

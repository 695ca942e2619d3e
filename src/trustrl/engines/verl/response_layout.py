"""Layouts of a micro-batch's response tokens: packed or padded for the model, one row of tokens for the region.

verl keeps responses as nested tensors with one row per sequence. Tests and older callers pad them on the right. verl's
own losses get them padded, (B, R). Wider data, such as K ids for each token, is never padded.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from trustrl.engines.common.token_places import TokenPlaces
from trustrl.errors import EngineError


class Places(NamedTuple):
    """The N tokens in the loss of one micro-batch, and the positions of the states that predict them."""

    tokens: TokenPlaces
    """Their places in the (B, R) responses. Only finding N waits for the device."""

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
        row = self.tokens.row
        return last_hidden[row, self.packed - self.offsets[row]]

    def as_model_output(self, x: Tensor) -> Tensor:
        """Scatters tokens to a nested tensor with one value per token, as verl's models return log-probs.

        Values outside the loss are 0.
        """
        out = x.new_zeros(self.num_packed).index_put((self.packed,), x)
        return torch.nested.nested_tensor_from_jagged(out, self.offsets)


def in_loss(data: Any) -> TokenPlaces:
    """Returns the tokens in the loss of a batch. Waits for the device."""
    return TokenPlaces.of_mask(padded(data["response_mask"]).bool())


def places(data: Any) -> Places:
    """Returns the tokens in the loss of one micro-batch, and their states."""
    tokens = in_loss(data)
    offsets, num_packed = data["input_ids"].offsets(), len(data["input_ids"].values())
    if data["responses"].is_nested:
        # The state before a token predicts it, and a sequence ends with its response.
        packed = (offsets[1:] - data["responses"].offsets().diff() - 1)[tokens.row] + tokens.column
    else:
        packed = tokens.of(no_padding_2_padding(torch.arange(num_packed, device=offsets.device), data))
    return Places(tokens, packed, offsets, num_packed)


def every_response_token(data: Any) -> TokenPlaces:
    """Returns all response tokens of one micro-batch, in the loss or not, without waiting for the device."""
    mask = data["response_mask"]
    if not mask.is_nested:
        return TokenPlaces.of_columns(
            list(torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)), mask.shape
        )
    row, column = _row_and_column(mask)
    shape = torch.Size((len(mask), _longest(mask)))
    return TokenPlaces(row, column, row * shape[1] + column, shape)


def _row_and_column(x: Any) -> tuple[Tensor, Tensor]:
    """Returns the row of each value of a nested tensor, and its place there."""
    offsets, count = x.offsets(), len(x.values())
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    # With `output_size`, torch does not wait for the sum of the lengths.
    row = torch.repeat_interleave(rows, offsets.diff(), output_size=count)
    return row, torch.arange(count, device=offsets.device) - offsets[row]


def taken(x: Any, tokens: TokenPlaces) -> Tensor:
    """Returns a field's values at N response tokens, (N, ...), from a nested tensor or from (B, R, ...).

    Sequences without such tokens may have any number of rows: verl pads short batches with a synthetic sample of 1
    response token and 128 rows of the sampler's distribution. `check_rows` has checked the others.
    """
    if not x.is_nested:
        return tokens.of(x)
    return x.values().index_select(0, x.offsets()[tokens.row] + tokens.column)


def padded(x: Any) -> Tensor:
    """Pads a tensor with one number per response token to (B, R), unless it is already padded."""
    if not x.is_nested:
        return x
    values, lengths = x.values(), x.offsets().diff()
    column = torch.arange(_longest(x), device=lengths.device)
    if not len(values):
        return values.new_zeros(len(lengths), len(column))
    # Places past the end of a row read some value of another, which `where` removes.
    index = (x.offsets()[:-1].unsqueeze(1) + column).clamp(max=len(values) - 1)
    return torch.where(column < lengths.unsqueeze(1), values[index], values.new_zeros(()))


def _longest(x: Any) -> int:
    """Returns the length of the longest row of a nested tensor. Waits for the device, unless torch knows it already."""
    return x._get_max_seqlen()


def check_rows(x: Any, data: Any) -> None:
    """Raises if a sequence in the loss has more or fewer rows in `x` than response tokens. Waits for the device.

    Raises:
        EngineError: If one has; names the numbers.
    """
    if not x.is_nested:
        return
    rows, lengths = x.offsets().diff(), data["responses"].offsets().diff()
    wrong = padded(data["response_mask"]).bool().any(-1) & (rows != lengths)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise EngineError(
            "The sampler's distribution must have one row for each response token, got "
            f"{int(rows[row])} rows for {int(lengths[row])} tokens. Record it with one of trustrl's agent loops."
        )


def as_responses(x: Tensor, tokens: TokenPlaces, data: Any, fill: float = 0) -> Tensor:
    """Returns the values of N tokens, (N, ...), as a field of a batch: nested, or (B, R, ...) if its responses are."""
    mask = data["response_mask"]
    cells = len(mask.values()) if mask.is_nested else mask.numel()
    index = mask.offsets()[tokens.row] + tokens.column if mask.is_nested else tokens.flat
    values = x.new_full((cells, *x.shape[1:]), fill).index_copy(0, index, x)
    if not mask.is_nested:
        return values.unflatten(0, mask.shape)
    return torch.nested.nested_tensor_from_jagged(values, mask.offsets())


def like_responses(x: Tensor, data: Any) -> Tensor:
    """Returns (B, R) as a nested tensor if the micro-batch's responses are nested, like verl's own fields."""
    mask = data["response_mask"]
    if not mask.is_nested:
        return x
    return torch.nested.nested_tensor_from_jagged(x[_row_and_column(mask)], mask.offsets())

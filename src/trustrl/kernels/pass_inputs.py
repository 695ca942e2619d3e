"""The inputs of one pass over the vocabulary, and the arithmetic at its given ids."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trustrl.kernels import tile_math


class PassInputs(NamedTuple):
    """Inputs and tile sizes of one pass over the vocabulary."""

    hidden: Tensor
    head: Tensor
    bias: Tensor | None
    ids: Tensor
    """[N, C], given ids, each within the vocabulary."""
    counts: Tensor
    """[N, C], True on the columns that are separate cells. No two of them in a row hold the same id."""
    scale: Tensor
    """[N], 1 / temperature."""
    softcap: float | None
    product_dtype: torch.dtype
    """The dtype of the products. Inputs are rounded to it first, because that is how the model defines its logits."""
    block_rows: int
    block_vocab: int

    def rows(self, rows: slice | Tensor) -> "PassInputs":
        """Returns the inputs of some of the rows."""
        return self._replace(
            hidden=self.hidden[rows], ids=self.ids[rows], counts=self.counts[rows], scale=self.scale[rows]
        )

    @property
    def large(self) -> bool:
        """True if the pass is large enough for compiled tiles to pay off."""
        return self.hidden.shape[0] * self.head.shape[0] >= tile_math.WORTH_COMPILING

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums and results."""
        return torch.promote_types(self.product_dtype, torch.float32)


def given_logits(inputs: PassInputs) -> Tensor:
    """Returns the logits at the given ids, as dot products in float32 or better."""
    hidden = inputs.hidden.to(inputs.product_dtype)
    raw = tile_math.fused_dots(hidden, inputs.head, inputs.ids, inputs.product_dtype, large=inputs.large)
    bias = None if inputs.bias is None else inputs.bias[inputs.ids]
    return tile_math.logits(raw, bias, inputs.scale.unsqueeze(-1), inputs.softcap)[0]


def weighted_head_rows(weights_NC: Tensor, inputs: PassInputs) -> Tensor:
    """Returns Σ_c weights[n, c] · head[ids[n, c]]."""
    if not inputs.ids.numel():
        return torch.zeros(inputs.hidden.shape, dtype=inputs.wide, device=inputs.hidden.device)
    weights_NC = weights_NC.to(inputs.head.dtype)
    # Sums while it gathers: the gathered rows alone would be [N, C, D].
    return F.embedding_bag(inputs.ids, inputs.head, per_sample_weights=weights_NC, mode="sum").to(inputs.wide)


def slices(size: int, step: int) -> list[slice]:
    """Returns consecutive slices of at most `step`, or one empty slice if `size` is 0."""
    return [slice(start, min(start + step, size)) for start in range(0, max(size, 1), step)]

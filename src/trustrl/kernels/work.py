"""What one pass over the vocabulary is about, and the arithmetic at its given ids."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trustrl.kernels import tiles

EAGER_DOT_ROWS = 64
"""Rows whose given head rows are gathered at once when the dot products are not compiled."""


class Pass(NamedTuple):
    """What one pass over the vocabulary is about."""

    hidden: Tensor
    head: Tensor
    bias: Tensor | None
    ids: Tensor
    """[N, C], each within the vocabulary."""
    counts: Tensor
    """[N, C], true on the columns that are cells of their own: no two of a row with the same id."""
    scale: Tensor
    """[N], 1 / temperature."""
    softcap: float | None
    product_dtype: torch.dtype
    """What the tiles are multiplied in. Inputs are rounded to it first: that is the model's definition."""
    block_rows: int
    block_vocab: int

    def rows(self, at: slice | Tensor) -> "Pass":
        """The same for some of the rows."""
        return self._replace(hidden=self.hidden[at], ids=self.ids[at], counts=self.counts[at], scale=self.scale[at])

    @property
    def large(self) -> bool:
        """Whether compiling pays."""
        return self.hidden.shape[0] * self.head.shape[0] >= tiles.WORTH_COMPILING

    @property
    def wide(self) -> torch.dtype:
        """What sums and results are held in."""
        return torch.promote_types(self.product_dtype, torch.float32)


def given_logits(work: Pass) -> Tensor:
    """Logits at the given ids, as dot products in float32 or better."""
    hidden = work.hidden.to(work.product_dtype)
    if work.large:
        raw = tiles.fused_dots(hidden, work.head, work.ids, work.product_dtype, large=True)
    else:
        raw = torch.cat(
            [
                tiles.dots(hidden[rows], work.head, work.ids[rows], work.product_dtype)
                for rows in slices(len(hidden), EAGER_DOT_ROWS)
            ]
        )
    bias = None if work.bias is None else work.bias[work.ids]
    return tiles.logits(raw, bias, work.scale.unsqueeze(-1), work.softcap)[0]


def spread(weights_NC: Tensor, work: Pass) -> Tensor:
    """Σ_c weights[n, c] · head[ids[n, c]]."""
    if not work.ids.numel():
        return torch.zeros(work.hidden.shape, dtype=work.wide, device=work.hidden.device)
    return F.embedding_bag(work.ids, work.head, per_sample_weights=weights_NC.to(work.head.dtype), mode="sum").to(
        work.wide
    )


def slices(size: int, step: int) -> list[slice]:
    """Consecutive slices of at most `step`; one, empty, where there is nothing."""
    return [slice(at, min(at + step, size)) for at in range(0, max(size, 1), step)]

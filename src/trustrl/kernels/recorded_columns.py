"""The recorded columns of each token, as kernels read them."""

from typing import NamedTuple

from torch import Tensor


class Columns(NamedTuple):
    """The recorded columns of each token, [n, width], and their tails, [n]."""

    ids: Tensor
    valid: Tensor
    """True on columns that hold a distinct id with mass."""

    anchor_logp: Tensor
    own_logp: Tensor
    token_ids: Tensor
    anchor_tail_logp: Tensor | None
    own_tail_logp: Tensor | None
    no_tail: bool
    """True if the columns are taken to be the whole distribution."""

    left_out: float | None
    """Largest mass outside the columns that is not a fault; None for any."""

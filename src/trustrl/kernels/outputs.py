"""What a pass over the vocabulary returns."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class TopLogprobs(NamedTuple):
    """The most probable ids of each token's distribution, most probable first."""

    ids: Int[Tensor, "N K"]
    logp: Float[Tensor, "N K"]
    tail_logp: Float[Tensor, " N"]
    """log of the mass outside these ids and the sampled token."""


class TokenLogprobs(NamedTuple):
    """Per-token results of one pass, float32 or better; differentiable in hidden states, head and bias.

    A row whose token id is below 0 is ignored: it costs nothing, holds zeros (−inf at ids, −1 as ids) and has no
    gradient.
    """

    logp: Float[Tensor, " N"]
    """log π of the sampled token."""

    logsumexp: Float[Tensor, " N"]
    """log Σ exp(logit)."""

    gathered_logp: Float[Tensor, "N K"] | None = None
    """log π at the given ids; −inf at ids below 0."""

    tail_logp: Float[Tensor, " N"] | None = None
    """log of the mass outside the given ids and the sampled token; a repeated id counts once."""

    topk: TopLogprobs | None = None
    """The `top_k` most probable ids."""

    entropy: Float[Tensor, " N"] | None = None
    """Entropy of π, nats."""

    logp_error: Float[Tensor, " N"] | None = None
    """How far the rounding of the products can have moved a log-prob of this row; see `trustrl.token_logprobs`."""

    tv: Float[Tensor, " N"] | None = None
    """½ Σ |anchor − π| over the whole vocabulary; no gradient."""

    kl: Float[Tensor, " N"] | None = None
    """KL(anchor‖π) over the whole vocabulary, nats; no gradient."""


def runs_of_ids(ids_NK: Int[Tensor, "*batch K"]) -> tuple[Int[Tensor, "*batch K"], Bool[Tensor, "*batch K"]]:
    """(columns in order of their id, whether an id starts there); equal ids keep the order of their columns."""
    ordered, source = ids_NK.sort(dim=-1, stable=True)
    starts = torch.ones_like(ids_NK, dtype=torch.bool)
    starts[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return source, starts


def first_of_its_id(ids_NK: Int[Tensor, "*batch K"]) -> Bool[Tensor, "*batch K"]:
    """True on the first column of each distinct id, whatever the order of the columns."""
    source, starts = runs_of_ids(ids_NK)
    return torch.zeros_like(starts).scatter(-1, source, starts)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype log-probs and loss terms are formed in: the input's own, float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def log_mass(x: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """log Σ exp over the columns; −inf with a gradient of 0 (not NaN) where nothing is there to add."""
    nothing = (x == -torch.inf).all(dim=-1)
    total = torch.logsumexp(torch.where(nothing.unsqueeze(-1), 0.0, x), dim=-1)
    return torch.where(nothing, -torch.inf, total)

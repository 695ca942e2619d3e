"""What a pass over the vocabulary returns."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Per-token results of one pass, float32 or better; differentiable in hidden states, head and bias."""

    logp: Float[Tensor, " N"]
    """log π of the sampled token."""

    logsumexp: Float[Tensor, " N"]
    """log Σ exp(logit)."""

    gathered_logp: Float[Tensor, "N K"] | None = None
    """log π at the given ids; −inf at ids below 0."""

    tail_logp: Float[Tensor, " N"] | None = None
    """log of the mass outside the given ids and the sampled token."""

    entropy: Float[Tensor, " N"] | None = None
    """Entropy of π, nats."""


def first_of_its_id(ids_NK: Int[Tensor, "*batch K"]) -> Bool[Tensor, "*batch K"]:
    """True on the first column of each distinct id, whatever the order of the columns."""
    ordered, source = ids_NK.sort(dim=-1, stable=True)
    first = torch.ones_like(ids_NK, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return torch.zeros_like(first).scatter(-1, source, first)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype log-probs and loss terms are formed in: the input's own, float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)

"""Columns of ids per token: those whose logits a pass reads exactly, and the recorded ones."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class GivenIds(NamedTuple):
    """The sampled token and the gathered ids of each row, in one array."""

    ids_NC: Int[Tensor, "N C"]
    """Column 0 is the sampled token. An empty column holds the sampled token's id."""

    counts_NC: Bool[Tensor, "N C"]
    """True on the first column of each distinct id."""

    first_NC: Int[Tensor, "N C"]
    """The first column that holds the same id."""

    live_N: Bool[Tensor, " N"]
    """False on ignored rows."""


def given_ids(token_ids_N: Int[Tensor, " N"], gather_ids_NK: Int[Tensor, "N K"] | None) -> GivenIds:
    """Returns both as one array. A gathered id below 0 is an empty column; a token id below 0 marks an ignored row."""
    live_N = token_ids_N >= 0
    token_N1 = token_ids_N.clamp(min=0).unsqueeze(-1)
    if gather_ids_NK is None or gather_ids_NK.shape[1] == 0:
        nothing = torch.zeros_like(token_N1)
        return GivenIds(token_N1, live_N.unsqueeze(-1), nothing, live_N)
    ids_NC = torch.cat([token_N1, torch.where(gather_ids_NK >= 0, gather_ids_NK, token_N1)], dim=-1)
    source, starts = runs_of_ids(ids_NC)
    column_C = torch.arange(ids_NC.shape[1], device=ids_NC.device)
    place = torch.where(starts, column_C, 0).cummax(-1).values
    first_NC = torch.empty_like(source).scatter(-1, source, source.gather(-1, place))
    counts_NC = (first_NC == column_C) & live_N.unsqueeze(-1)
    return GivenIds(ids_NC, counts_NC, first_NC, live_N)


def runs_of_ids(ids_NK: Int[Tensor, "*batch K"]) -> tuple[Int[Tensor, "*batch K"], Bool[Tensor, "*batch K"]]:
    """Returns (columns sorted by id, True where a run of equal ids starts). The sort is stable."""
    ordered, source = ids_NK.sort(dim=-1, stable=True)
    starts = torch.ones_like(ids_NK, dtype=torch.bool)
    starts[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return source, starts


def first_of_its_id(ids_NK: Int[Tensor, "*batch K"]) -> Bool[Tensor, "*batch K"]:
    """Returns True on the first column of each distinct id. The columns may be in any order."""
    source, starts = runs_of_ids(ids_NK)
    return torch.zeros_like(starts).scatter(-1, source, starts)


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

"""Which ids of a row are cells of their own, and what follows from their logits and the rest's log-sum-exp."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.kernels.outputs import TokenLogprobs, TopLogprobs, log_mass, runs_of_ids


class GivenIds(NamedTuple):
    """The sampled token and the gathered ids of each row, brought to one form."""

    ids_NC: Int[Tensor, "N C"]
    """Column 0 is the sampled token. An empty column is read at the sampled token's id."""

    counts_NC: Bool[Tensor, "N C"]
    """True on the first column of each distinct id."""

    first_NC: Int[Tensor, "N C"]
    """The column where the same id stands first."""

    live_N: Bool[Tensor, " N"]
    """False on ignored rows."""


def given_ids(token_ids_N: Int[Tensor, " N"], gather_ids_NK: Int[Tensor, "N K"] | None) -> GivenIds:
    """Brings both to one form: ids below 0 are empty columns, a token id below 0 makes an ignored row."""
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


class Known(NamedTuple):
    """What a pass over the vocabulary found out about each row."""

    given_NC: Float[Tensor, "N C"]
    """Logits at the given ids, right where they count."""

    found_ids_NF: Int[Tensor, "N F"]
    """More cells; −1 where there is none. The `top_k` largest ids that were not given are among them."""

    found_NF: Float[Tensor, "N F"]
    """Their logits."""

    rest_N: Float[Tensor, " N"]
    """log-sum-exp of all other logits."""

    inner_N: Float[Tensor, " N"]
    """Entropy within the rest."""

    rounding_N: Float[Tensor, " N"]
    """The most the product's dtype can have moved a logit of the rest."""

    own_rounding_N: Float[Tensor, " N"]
    """What float32's own rounding moves any logit by: √D units in the last place of the largest, an estimate."""


def outputs(
    given: GivenIds, known: Known, gather_ids_NK: Int[Tensor, "N K"] | None, top_k: int, entropy: bool
) -> TokenLogprobs:
    """Everything a caller may ask for, by plain differentiable arithmetic on the cells."""
    live_N = given.live_N
    rest_N = torch.where(live_N, known.rest_N, 0.0)  # an ignored row is all rest
    found_NF = known.found_NF.masked_fill(known.found_ids_NF < 0, -torch.inf)
    cells_NC = torch.cat([known.given_NC.masked_fill(~given.counts_NC, -torch.inf), found_NF], dim=-1)
    lse_N = torch.logsumexp(torch.cat([cells_NC, rest_N.unsqueeze(-1)], dim=-1), dim=-1)
    logp_NC = known.given_NC.gather(-1, given.first_NC) - lse_N.unsqueeze(-1)
    cell_logp_NC = cells_NC - lse_N.unsqueeze(-1)
    rest_logp_N = rest_N - lse_N

    gathered = tail = top = spread = None
    if gather_ids_NK is not None:
        gathered = logp_NC[:, 1:].masked_fill((gather_ids_NK < 0) | ~live_N.unsqueeze(-1), -torch.inf)
        tail = log_mass(torch.cat([found_NF, rest_N.unsqueeze(-1)], dim=-1)) - lse_N
    if top_k:
        logp, at = cell_logp_NC.topk(top_k, dim=-1)
        ids = torch.cat([given.ids_NC, known.found_ids_NF], dim=-1).gather(-1, at)
        named_NC = torch.zeros_like(cells_NC, dtype=torch.bool).scatter(-1, at, True)
        named_NC[:, 0] = True  # the sampled token
        others_NC = cells_NC.masked_fill(named_NC, -torch.inf)
        beyond_N = log_mass(torch.cat([others_NC, rest_N.unsqueeze(-1)], dim=-1)) - lse_N
        top = TopLogprobs(torch.where(logp > -torch.inf, ids, -1), logp, beyond_N)
    if entropy:
        # −Σ p log p over the cells, and the rest as one cell with an entropy of its own: no term cancels another.
        spread = -(_p_log_p(cell_logp_NC).sum(-1) + _p_log_p(rest_logp_N) - rest_logp_N.exp() * known.inner_N)
        spread = torch.where(live_N, spread, 0.0)
    return TokenLogprobs(
        logp=torch.where(live_N, logp_NC[:, 0], 0.0),
        logsumexp=lse_N,
        gathered_logp=gathered,
        tail_logp=tail,
        topk=top,
        entropy=spread,
        # The rest's mass t is off by a factor within exp(±rounding), so the log-sum-exp moves by at most log1p(…).
        logp_error=torch.log1p(rest_logp_N.detach().exp() * torch.expm1(known.rounding_N)) + 2 * known.own_rounding_N,
    )


def _p_log_p(logp: Tensor) -> Tensor:
    """p log p, 0 at p = 0, with a finite gradient there too."""
    there = logp > -torch.inf
    safe = torch.where(there, logp, 0.0)
    return torch.where(there, safe.exp() * safe, 0.0)

"""The outputs of a pass over the vocabulary, and their computation from each row's logit summary."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trustrl.kernels.id_columns import GivenIds


class TopLogprobs(NamedTuple):
    """The most probable ids of each token's distribution, most probable first."""

    ids: Int[Tensor, "N K"]
    logp: Float[Tensor, "N K"]
    tail_logp: Float[Tensor, " N"]
    """log of the mass outside these ids and the sampled token."""


class TokenLogprobs(NamedTuple):
    """Per-token results of one pass, in float32 or better. Differentiable in hidden states, head and bias.

    A row whose token id is below 0 is ignored. It has no gradient and holds zeros (−inf as the log-prob of an id, −1 as
    an id). On a CPU it costs nothing.
    """

    logp: Float[Tensor, " N"]
    """log π of the sampled token."""

    logsumexp: Float[Tensor, " N"]
    """log Σ exp(logit)."""

    gathered_logp: Float[Tensor, "N K"] | None = None
    """log π at the given ids; −inf at ids below 0."""

    tail_logp: Float[Tensor, " N"] | None = None
    """log of the mass outside the given ids and the sampled token. A repeated id counts once."""

    topk: TopLogprobs | None = None
    """The `top_k` most probable ids."""

    entropy: Float[Tensor, " N"] | None = None
    """Entropy of π, in nats."""

    logp_error: Float[Tensor, " N"] | None = None
    """Bound on the error that rounded products cause in this row's log-probs; see `trustrl.token_logprobs`."""

    tv: Float[Tensor, " N"] | None = None
    """½ Σ |anchor − π| over the whole vocabulary. Without gradient."""

    kl: Float[Tensor, " N"] | None = None
    """KL(anchor‖π) over the whole vocabulary, in nats. Without gradient."""


class LogitSummary(NamedTuple):
    """Summary of each row's logits: the cells (given ids and ids found by the pass), and sums over the rest."""

    given_NC: Float[Tensor, "N C"]
    """Logits at the given ids. Only the columns that count hold valid values."""

    found_ids_NF: Int[Tensor, "N F"]
    """Ids of further cells; −1 marks an empty column. They include the `top_k` largest ids that were not given."""

    found_NF: Float[Tensor, "N F"]
    """Logits at `found_ids_NF`."""

    rest_N: Float[Tensor, " N"]
    """log-sum-exp of all other logits."""

    inner_N: Float[Tensor, " N"]
    """Entropy within the rest."""

    rounding_N: Float[Tensor, " N"]
    """Largest error that the product's dtype can cause in a logit of the rest."""

    own_rounding_N: Float[Tensor, " N"]
    """Estimated float32 rounding error of any logit: √D units in the last place of the largest logit."""


def assembled_logprobs(
    row_ids: GivenIds, summary: LogitSummary, gather_ids_NK: Int[Tensor, "N K"] | None, top_k: int, entropy: bool
) -> TokenLogprobs:
    """Returns every requested output, by plain differentiable arithmetic on the cells and the rest."""
    live_N = row_ids.live_N
    rest_N = torch.where(live_N, summary.rest_N, 0.0)  # an ignored row is all rest
    found_NF = summary.found_NF.masked_fill(summary.found_ids_NF < 0, -torch.inf)
    cells_NC = torch.cat([summary.given_NC.masked_fill(~row_ids.counts_NC, -torch.inf), found_NF], dim=-1)
    lse_N = torch.logsumexp(torch.cat([cells_NC, rest_N.unsqueeze(-1)], dim=-1), dim=-1)
    logp_NC = summary.given_NC.gather(-1, row_ids.first_NC) - lse_N.unsqueeze(-1)
    cell_logp_NC = cells_NC - lse_N.unsqueeze(-1)
    rest_logp_N = rest_N - lse_N

    gathered = tail = top = entropy_N = None
    if gather_ids_NK is not None:
        gathered = logp_NC[:, 1:].masked_fill((gather_ids_NK < 0) | ~live_N.unsqueeze(-1), -torch.inf)
        tail = log_mass(torch.cat([found_NF, rest_N.unsqueeze(-1)], dim=-1)) - lse_N
    if top_k:
        logp, place_NK = cell_logp_NC.topk(top_k, dim=-1)
        ids = torch.cat([row_ids.ids_NC, summary.found_ids_NF], dim=-1).gather(-1, place_NK)
        named_NC = torch.zeros_like(cells_NC, dtype=torch.bool).scatter(-1, place_NK, True)
        named_NC[:, 0].fill_(True)  # the sampled token
        others_NC = cells_NC.masked_fill(named_NC, -torch.inf)
        beyond_N = log_mass(torch.cat([others_NC, rest_N.unsqueeze(-1)], dim=-1)) - lse_N
        top = TopLogprobs(torch.where(logp > -torch.inf, ids, -1), logp, beyond_N)
    if entropy:
        # −Σ p log p over the cells, plus the rest as one cell and the rest's inner entropy. No term cancels another.
        entropy_N = -(_p_log_p(cell_logp_NC).sum(-1) + _p_log_p(rest_logp_N) - rest_logp_N.exp() * summary.inner_N)
        entropy_N = torch.where(live_N, entropy_N, 0.0)
    # Rounding scales the rest's mass by a factor within exp(±rounding) and moves the log-sum-exp by at most log1p(…).
    product_error_N = torch.log1p(rest_logp_N.detach().exp() * torch.expm1(summary.rounding_N))
    return TokenLogprobs(
        logp=torch.where(live_N, logp_NC[:, 0], 0.0),
        logsumexp=lse_N,
        gathered_logp=gathered,
        tail_logp=tail,
        topk=top,
        entropy=entropy_N,
        logp_error=product_error_N + 2 * summary.own_rounding_N,
    )


def log_mass(x: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """Returns log Σ exp over the columns. A row of −inf gives −inf with a gradient of 0 instead of NaN."""
    nothing = (x == -torch.inf).all(dim=-1)
    total = torch.logsumexp(torch.where(nothing.unsqueeze(-1), 0.0, x), dim=-1)
    return torch.where(nothing, -torch.inf, total)


def wide_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype for log-probs and loss terms: the dtype of `x`, but at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def _p_log_p(logp: Tensor) -> Tensor:
    """Returns p log p, which is 0 at p = 0 and has a finite gradient there."""
    present = logp > -torch.inf
    safe = torch.where(present, logp, 0.0)
    return torch.where(present, safe.exp() * safe, 0.0)

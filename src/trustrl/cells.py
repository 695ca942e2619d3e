"""Cells: the partition of the vocabulary that Top-K, projected and exact regions read, and the faults found in it."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.config.axes import Needs
from trustrl.numerics import either
from trustrl.records import PolicyTokens, RolloutTokens, TopK

LARGEST_LOGP = 1e-3
"""Log-probs may exceed 0 by this much (rounding in the engine); anything above is no log-prob and is a fault."""

ANCHOR_NOISE = 0.5
"""Nats by which a sampler's two passes over one token may differ: bf16 decoding and prefill differ by up to 0.28."""

FILL = 1e-12
"""The anchor probability at the policy's own top ids with `rest="fill"`, where the record has none."""

COARSE_ROUNDOFF, FINE_ROUNDOFF = 2.0**-8, 2.0**-24
"""Unit roundoff of bfloat16 and of float32, the finest that engines compute in."""

LOW_BITS = 0x1FFF
"""The bits of a float32 that are 0 in every bfloat16 and float16 number."""

FINEST_RECORD = torch.empty(0, dtype=torch.float32)
"""Engines record log-probs in float32 at best, whatever dtype they arrive in."""


class Cells(NamedTuple):
    """A partition of the vocabulary: the sampled token, other known ids, and what is left.

    Rows of unusable tokens hold anything, NaN included: whoever reads cells blanks those rows afterwards.
    """

    log_anchor: Float[Tensor, "n c"]
    """log b per known id; −inf in columns that hold no cell."""

    log_policy: Float[Tensor, "n c"]
    """log π per known id, with gradient."""

    anchor: Float[Tensor, "n c"]
    """b itself."""

    policy: Float[Tensor, "n c"]
    """π itself."""

    anchor_tail: Float[Tensor, " n"]
    """m: b's mass outside the cells."""

    policy_tail: Float[Tensor, " n"]
    """p: π's mass outside the cells, with gradient."""

    sampled: Int[Tensor, " n"] | None
    """The sampled token's column where it has one (full vocabulary); None where it is a cell beside these."""

    resolution: float
    """The smallest tail that means anything: 1 − Σ is known only to the rounding of what was summed; 0 if exact."""


def vocabulary_cells(
    policy: PolicyTokens, rollout: RolloutTokens, needs: Needs, usable: Tensor, log_anchor: Tensor
) -> tuple[Cells, dict[str, Bool[Tensor, " n"]]]:
    """Returns one cell for each id of the vocabulary, and for each kind of fault the tokens that are free of it."""
    full, policy_logp, token_ids = rollout.full, policy.full_logp, rollout.token_ids
    assert full is not None  # `require` has seen to these
    assert policy_logp is not None
    assert token_ids is not None
    vocabulary, double = full.logp.shape[-1], log_anchor.dtype
    token = token_ids.reshape(-1)
    log_b = full.logp.detach().reshape(-1, vocabulary).to(double)
    log_p = policy_logp.detach().reshape(-1, vocabulary).to(double)
    support = (token >= 0) & (token < vocabulary) & _plausible(log_b) & _plausible(log_p)
    token = token.clamp(0, max(vocabulary - 1, 0))
    b, p = log_b.exp(), log_p.exp()
    judged = usable & support
    good = {
        "support": support,
        "mass": ~judged | (_at_most_one(b.sum(-1), log_b) & _at_most_one(p.sum(-1), log_p)),
    }
    if vocabulary:
        own = log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        logp = policy.logp.detach().reshape(-1).to(double)
        good["column"] = ~judged | _same_logp(own, logp)
    if needs.projects:
        fine = (usable & _all(good)).unsqueeze(-1)
        log_p = torch.where(fine, policy_logp.reshape(-1, vocabulary).to(double), -torch.inf)
        p = log_p.exp()
    tail = torch.zeros_like(log_anchor)
    return Cells(log_b, log_p, b, p, tail, tail, token, 0.0), good


def topk_cells(
    policy: PolicyTokens, rollout: RolloutTokens, needs: Needs, usable: Tensor, log_anchor: Tensor
) -> tuple[Cells, dict[str, Bool[Tensor, " n"]]]:
    """Returns one cell for each recorded id other than the sampled one, and one tail.

    Also returns, for each kind of fault, the tokens that are free of it:

    - `support`: no log-prob is NaN or above 0, and the sampled id is in range.
    - `mass`: neither side's probabilities sum to more than 1 (see `largest_mass`).
    - `column`: the policy's log-prob in the sampled id's column is its `logp` (see `_same_logp`).
    - `narrow`: a record with fewer than k columns leaves at most `tail_mass` of the anchor out.
    """
    topk, own, token_ids = rollout.topk, policy.topk_logp, rollout.token_ids
    assert topk is not None  # `require` has seen to these
    assert own is not None
    assert token_ids is not None
    if topk.ids.shape[-1] > needs.topk:
        topk, own = _narrow(topk, own, needs.topk)
    ends_early = topk.ids.shape[-1] < needs.topk
    if needs.own_topk != "none" and policy.topk is not None:
        topk, own = _join_own_topk(topk, own, policy, fill=needs.own_topk == "fill")
    width, double = topk.ids.shape[-1], log_anchor.dtype
    tails = None
    if topk.tail_logp is not None and policy.tail_logp is not None and needs.own_topk != "fill":
        tails = topk.tail_logp.detach().reshape(-1).to(double), policy.tail_logp.reshape(-1).to(double)
    token, logp = token_ids.reshape(-1), policy.logp.reshape(-1).to(double)
    valid = topk.valid.reshape(-1, width)
    sampled = valid & (topk.ids.reshape(-1, width) == token.unsqueeze(-1))
    known = valid & ~sampled
    # A copy that is then filled in place: at these sizes fresh memory costs about as much as the arithmetic.
    log_b, log_p = (
        x.detach().reshape(-1, width).to(double, copy=True).masked_fill_(~known, -torch.inf) for x in (topk.logp, own)
    )
    b, p = log_b.exp(), log_p.exp()
    mass_b, mass_p = b.sum(-1), p.sum(-1)
    support = (token >= 0) & _plausible(log_b) & _plausible(log_p)
    if tails is not None:
        support = support & (tails[0] <= LARGEST_LOGP) & (tails[1].detach() <= LARGEST_LOGP)
    at = sampled.to(torch.uint8).argmax(-1, keepdim=True)
    has_column = sampled.gather(-1, at).squeeze(-1)
    own_b, own_p = (x.detach().reshape(-1, width).gather(-1, at).squeeze(-1).to(double) for x in (topk.logp, own))
    # The sampler may have recorded its top-K in another pass than the sampled token.
    all_b = mass_b + torch.where(has_column, own_b, log_anchor - ANCHOR_NOISE).exp()
    all_p = mass_p + logp.detach().exp()
    if tails is not None:
        all_b, all_p = all_b + tails[0].exp(), all_p + tails[1].detach().exp()
    judged = usable & support
    good = {
        "support": support,
        "mass": ~judged | (_at_most_one(all_b, log_b) & _at_most_one(all_p, log_p)),
        "column": ~judged | ~has_column | _same_logp(own_p, logp.detach()),
    }
    if ends_early:
        good["narrow"] = ~judged | (1 - log_anchor.exp() - mass_b <= needs.tail_mass)
    if needs.projects:
        # With gradient, and blanked before the exponential: a NaN in a row that is left out would come back as its
        # gradient. (Otherwise rows may hold anything: nobody differentiates them.)
        fine = usable & _all(good)
        log_p = torch.where(known & fine.unsqueeze(-1), own.reshape(-1, width).to(double), -torch.inf)
        logp = torch.where(fine, logp, 0.0)
        tails = None if tails is None else (tails[0], torch.where(fine, tails[1], -torch.inf))
        p = log_p.exp()
        mass_p = p.sum(-1)
    resolution = 0.0
    if needs.own_topk == "fill":
        tail_b = tail_p = torch.zeros_like(log_anchor)
    elif tails is not None:
        tail_b, tail_p = tails[0].exp(), tails[1].exp()
    else:
        # Both by subtraction, even if one side knows better: unlike representations differ where policies do not.
        tail_b, tail_p = ((1 - x.exp() - y).clamp(min=0.0) for x, y in ((log_anchor, mass_b), (logp, mass_p)))
        resolution = resolution_of(topk.logp, own)
    return Cells(log_b, log_p, b, p, tail_b, tail_p, None, resolution), good


def resolution_of(*logp: Tensor) -> float:
    """Returns the smallest 1 − p that log-probs made in these dtypes can express."""
    return max(torch.finfo(x.dtype).eps for x in (*logp, FINEST_RECORD))


def largest_mass(num_cells: int, unit_roundoff: float) -> float:
    r"""Returns the largest sum that the probabilities of distinct ids can have after rounding.

        Σ ≤ n^u · exp(1e-3),   n cells, unit roundoff u

    A log-prob stored with unit roundoff u is ℓ·(1 + θ) with |θ| ≤ u, so a probability p becomes at most p^(1−u), and
    n of them that sum to 1 become at most n^u (equal ones are the worst case). The factor exp(1e-3) is what a single
    log-prob may exceed 0 by. For 64 ids: 1.001 for float32 numbers, 1.018 for bfloat16 ones.
    """
    return math.exp(LARGEST_LOGP + math.log(max(num_cells, 1)) * unit_roundoff)


def is_coarse(logp: Float[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
    """Returns whether each number fits 11 significant bits, as every bfloat16 and float16 number does.

    Trainers often compute in bfloat16 and hand over float32: the numbers show how they were rounded, the dtype does
    not. A float32 number fits by chance once in 8,192.
    """
    return (logp.detach().to(torch.float32).contiguous().view(torch.int32) & LOW_BITS) == 0


def _at_most_one(mass: Tensor, columns: Tensor) -> Bool[Tensor, " n"]:
    num_cells = columns.shape[-1] + 2  # the sampled token and the tail are cells too
    coarse, fine = (largest_mass(num_cells, u) for u in (COARSE_ROUNDOFF, FINE_ROUNDOFF))
    return mass <= either(is_coarse(columns).all(-1), coarse, fine, like=mass)


def _same_logp(column: Tensor, logp: Tensor) -> Bool[Tensor, " n"]:
    """Compares two records of one log-prob: each was rounded once, so |ℓ₁ − ℓ₂| ≤ 2u·|ℓ| + 1e-3."""
    coarse = is_coarse(column) | is_coarse(logp)
    slack = either(coarse, 2 * COARSE_ROUNDOFF, 2 * FINE_ROUNDOFF, like=logp)
    return (column - logp).abs() <= slack * logp.abs() + LARGEST_LOGP


def _all(good: dict[str, Tensor]) -> Bool[Tensor, " n"]:
    first, *others = good.values()
    for one in others:
        first = first & one
    return first


def _plausible(logp: Tensor) -> Bool[Tensor, " n"]:
    """False on rows with a NaN or with anything above 0 by more than rounding; −inf is an empty cell."""
    return logp.detach().amax(-1) <= LARGEST_LOGP  # amax hands a NaN on, and NaN compares False


def _narrow(topk: TopK, own: Tensor, k: int) -> tuple[TopK, Tensor]:
    """The k most probable of more recorded columns; what is left joins the tail."""
    keep = topk.logp.masked_fill(~topk.valid, -torch.inf).topk(k, dim=-1).indices
    # The recorded tail no longer fits; both tails are derived from the columns instead.
    return TopK(topk.ids.gather(-1, keep), topk.logp.gather(-1, keep), topk.of), own.gather(-1, keep)


def _join_own_topk(topk: TopK, own: Tensor, policy: PolicyTokens, *, fill: bool) -> tuple[TopK, Tensor]:
    """The recorded columns and the policy's own top ids, each id once, where the anchor is known or filled."""
    assert policy.topk is not None
    there = policy.topk_anchor_logp
    if there is None:
        if not fill:
            return topk, own
        there = torch.full_like(policy.topk.logp, math.log(FILL))
    recorded_ids = topk.ids.masked_fill(~topk.valid, -1)
    own_ids = policy.topk.ids.masked_fill(~policy.topk.valid, -1)
    joined = TopK(
        torch.cat([recorded_ids, own_ids], dim=-1),
        torch.cat([topk.logp, there.detach().to(topk.logp.dtype)], dim=-1),
        topk.of,
    )
    return joined, torch.cat([own, policy.topk.logp.to(own.dtype)], dim=-1)

"""Partitions of the vocabulary for Top-K, projected and exact regions, and the faults found in them."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.config.axes import Needs
from trustrl.core.numerics import either, kl_term
from trustrl.core.records import PolicyTokens, RolloutTokens, TopK
from trustrl.kernels.id_columns import Columns

LARGEST_LOGP = 1e-3
"""Largest log-prob that rounding in an engine explains. A larger value is a fault."""

ANCHOR_NOISE = 0.5
"""Nats by which two passes of a sampler over one token may differ. bf16 decoding and prefill differ by up to 0.28."""

FILL = 1e-12
"""Probability of ids that are not recorded, with `rest="fill"` and `rest="published"`."""

COARSE_ROUNDOFF, FINE_ROUNDOFF = 2.0**-8, 2.0**-24
"""Unit roundoff of bfloat16 and of float32, the finest dtype that engines compute in."""

LOW_BITS = 0x1FFF
"""Bits of a float32 that are 0 in every bfloat16 and float16 number."""

FINEST_RECORD = torch.empty(0, dtype=torch.float32)
"""Stand-in for the finest record: engines compute log-probs in float32 at best, regardless of the dtype passed."""


class Partition(NamedTuple):
    """Partition of the vocabulary into cells: the sampled token, other known ids, and a tail.

    Rows of unusable tokens may hold any value, including NaN. Readers blank those rows afterwards.
    """

    log_anchor: Float[Tensor, "n c"]
    """log b per known id; −inf in columns without a cell."""

    log_policy: Float[Tensor, "n c"]
    """log π per known id, with gradient."""

    anchor: Float[Tensor, "n c"]
    """b per known id."""

    policy: Float[Tensor, "n c"]
    """π per known id."""

    anchor_tail: Float[Tensor, " n"]
    """m: mass of b outside the cells."""

    policy_tail: Float[Tensor, " n"]
    """p: mass of π outside the cells, with gradient."""

    sampled: Int[Tensor, " n"] | None
    """Column of the sampled token (full vocabulary), or None if the sampled token is a cell in addition to these."""

    resolution: float
    """Smallest meaningful tail: 1 − Σ is accurate only to the rounding of its summands. 0 if the tail is exact."""

    recorded: Bool[Tensor, " n"] | None = None
    """True where the sampled token is one of the recorded ids. None with the full vocabulary."""

    def tv(self) -> Float[Tensor, " n"]:
        """Returns Σ |b − π| over the known ids."""
        return (self.anchor - self.policy).detach().abs_().sum(-1)

    def kl(self) -> Float[Tensor, " n"]:
        """Returns the known ids' share of KL(b‖π)."""
        return kl_term(self.log_anchor, self.log_policy.detach()).sum(-1)


class CellSums(NamedTuple):
    """Sums over the cells of a partition whose columns were never spread out in float64."""

    anchor_tail: Float[Tensor, " n"]
    policy_tail: Float[Tensor, " n"]
    sum_tv: Float[Tensor, " n"]
    sum_kl: Float[Tensor, " n"]
    resolution: float
    columns: Columns
    """The columns themselves, with the policy's gradient."""

    def tv(self) -> Float[Tensor, " n"]:
        """Returns Σ |b − π| over the known ids."""
        return self.sum_tv

    def kl(self) -> Float[Tensor, " n"]:
        """Returns the known ids' share of KL(b‖π)."""
        return self.sum_kl

    def spread(self, logp: Float[Tensor, " n"], usable: Bool[Tensor, " n"]) -> Partition:
        """Returns the partition, with gradient. `logp` is log π of the sampled token; unusable rows are empty."""
        columns, double = self.columns, self.anchor_tail.dtype
        sampled = columns.valid & (columns.ids == columns.token_ids.unsqueeze(-1))
        known = columns.valid & ~sampled & usable.unsqueeze(-1)
        log_b, log_p = (torch.where(known, x.to(double), -torch.inf) for x in (columns.anchor_logp, columns.own_logp))
        p, tail = log_p.exp(), columns.own_tail_logp
        if tail is None:
            tail_p = (1 - logp.to(double).exp() - p.sum(-1)).clamp(min=0.0)
        else:
            tail_p = torch.where(usable, tail.to(double), -torch.inf).exp()
        return Partition(log_b, log_p, log_b.exp(), p, self.anchor_tail, tail_p, None, self.resolution, sampled.any(-1))


def vocabulary_partition(
    policy: PolicyTokens, rollout: RolloutTokens, needs: Needs, usable: Tensor, log_anchor: Tensor
) -> tuple[Partition, dict[str, Bool[Tensor, " n"]]]:
    """Returns one cell for each id of the vocabulary and, for each kind of fault, the tokens that are free of it."""
    full, policy_logp, token_ids = rollout.full, policy.full_logp, rollout.token_ids
    assert full is not None  # `require` has checked these
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
    return Partition(log_b, log_p, b, p, tail, tail, token, 0.0), good


class _Cells(NamedTuple):
    """The recorded columns in float64, without gradient; −inf in columns that are not cells."""

    log_b: Float[Tensor, "n c"]
    log_p: Float[Tensor, "n c"]
    known: Bool[Tensor, "n c"]
    """True on columns that are cells: valid, and not the sampled token's."""

    has_sampled: Bool[Tensor, " n"]
    """True where the sampled token has a column."""

    sampled_b: Float[Tensor, " n"]
    """log b in the sampled token's column, where there is one."""

    sampled_p: Float[Tensor, " n"]


Tails = tuple[Float[Tensor, " n"], Float[Tensor, " n"]]
"""Log of the mass outside the columns and the sampled token: the anchor's and the policy's."""


def topk_partition(
    policy: PolicyTokens, rollout: RolloutTokens, needs: Needs, usable: Tensor, log_anchor: Tensor
) -> tuple[Partition, dict[str, Bool[Tensor, " n"]]]:
    """Returns one cell for each recorded id other than the sampled one, and one tail.

    Also returns, for each kind of fault, the tokens that are free of it:

    - `support`: no log-prob is NaN or above 0, and the sampled id is in range.
    - `mass`: neither side's probabilities sum to more than 1 (see `largest_mass`).
    - `column`: the policy's log-prob in the sampled id's column equals its `logp` (see `_same_logp`).
    - `narrow`: a record with fewer than k columns leaves out at most `tail_mass` of the anchor.
    """
    columns, resolution = flat_columns(policy, rollout, needs)
    double = log_anchor.dtype
    tails: Tails | None = None
    if columns.anchor_tail_logp is not None and columns.own_tail_logp is not None:
        tails = columns.anchor_tail_logp.to(double), columns.own_tail_logp.to(double)
    logp = policy.logp.reshape(-1).to(double)
    cells = _cells(columns, double)
    log_b, log_p = cells.log_b, cells.log_p
    b, p = log_b.exp(), log_p.exp()
    mass_b, mass_p = b.sum(-1), p.sum(-1)
    good = _topk_faults(cells, (mass_b, mass_p), tails, columns.token_ids, logp.detach(), log_anchor, usable)
    if columns.left_out is not None:
        left_out = 1 - log_anchor.exp() - mass_b
        good["narrow"] = ~(usable & good["support"]) | (left_out <= columns.left_out)
    if needs.projects:
        # Recomputed with gradient, and blanked before the exponential: a NaN in a dropped row would return as its
        # gradient. Without a projection nobody differentiates the columns, and such rows may hold anything.
        fine = usable & _all(good)
        log_p = torch.where(cells.known & fine.unsqueeze(-1), columns.own_logp.to(double), -torch.inf)
        logp = torch.where(fine, logp, 0.0)
        tails = None if tails is None else (tails[0], torch.where(fine, tails[1], -torch.inf))
        p = log_p.exp()
        mass_p = p.sum(-1)
    if needs.fills:
        tail_b = tail_p = torch.zeros_like(log_anchor)
    elif tails is not None:
        tail_b, tail_p = tails[0].exp(), tails[1].exp()
    else:
        # Both by subtraction, even if one side knows better: unlike representations differ where policies agree.
        tail_b, tail_p = ((1 - x.exp() - y).clamp(min=0.0) for x, y in ((log_anchor, mass_b), (logp, mass_p)))
    return Partition(log_b, log_p, b, p, tail_b, tail_p, None, resolution, cells.has_sampled), good


def flat_columns(policy: PolicyTokens, rollout: RolloutTokens, needs: Needs) -> tuple[Columns, float]:
    """Returns the columns that a region reads, the policy's with gradient, and the smallest meaningful tail."""
    topk, own = rollout.topk, policy.topk_logp
    assert topk is not None  # `require` has checked these
    assert own is not None
    if topk.ids.shape[-1] > needs.topk:
        topk, own = _narrow(topk, own, needs.topk)
    ends_early = topk.ids.shape[-1] < needs.topk
    if needs.own_topk == "published":
        topk, own, policy = _selected(topk, own, policy, rollout, needs.tail_mass)
    if needs.own_topk != "none" and policy.topk is not None:
        topk, own = _join_own_topk(topk, own, policy, fill=needs.fills)
    width = topk.ids.shape[-1]
    # Both or neither: they must be computed alike.
    tails = topk.tail_logp is not None and policy.tail_logp is not None and not needs.fills
    assert rollout.token_ids is not None  # `require_fields` has checked it
    columns = Columns(
        ids=topk.ids.reshape(-1, width),
        valid=topk.valid.reshape(-1, width),
        anchor_logp=topk.logp.detach().reshape(-1, width),
        own_logp=own.reshape(-1, width),
        token_ids=rollout.token_ids.reshape(-1),
        anchor_tail_logp=topk.tail_logp.detach().reshape(-1) if tails and topk.tail_logp is not None else None,
        own_tail_logp=policy.tail_logp.reshape(-1) if tails and policy.tail_logp is not None else None,
        no_tail=needs.fills,
        left_out=needs.tail_mass if ends_early else None,
    )
    return columns, 0.0 if tails or needs.fills else resolution_of(topk.logp, own)


def column_faults(columns: Columns) -> list[str]:
    """Returns the kinds of faults that recorded columns can have."""
    return ["support", "mass", "column", *([] if columns.left_out is None else ["narrow"])]


def _cells(columns: Columns, dtype: torch.dtype) -> _Cells:
    """Returns the columns in a dtype, and finds the sampled token's."""
    sampled = columns.valid & (columns.ids == columns.token_ids.unsqueeze(-1))
    known = columns.valid & ~sampled
    both = columns.anchor_logp.detach(), columns.own_logp.detach()
    # A copy, then filled in place: at these sizes, allocating memory costs about as much as the arithmetic.
    log_b, log_p = (x.to(dtype, copy=True).masked_fill_(~known, -torch.inf) for x in both)
    # torch has no argmax of bools.
    place = sampled.to(torch.uint8).argmax(-1, keepdim=True)
    sides = (x.gather(-1, place).squeeze(-1).to(dtype) for x in both)
    return _Cells(log_b, log_p, known, sampled.gather(-1, place).squeeze(-1), *sides)


def _topk_faults(
    cells: _Cells,
    masses: tuple[Tensor, Tensor],
    tails: Tails | None,
    token: Tensor,
    logp: Tensor,
    log_anchor: Tensor,
    usable: Tensor,
) -> dict[str, Bool[Tensor, " n"]]:
    """Returns, for each kind of fault in the columns, the tokens that are free of it."""
    support = (token >= 0) & _plausible(cells.log_b) & _plausible(cells.log_p)
    # The sampler may record its top K in another pass than the sampled token.
    all_b = masses[0] + torch.where(cells.has_sampled, cells.sampled_b, log_anchor - ANCHOR_NOISE).exp()
    all_p = masses[1] + logp.exp()
    if tails is not None:
        tail_b, tail_p = tails[0], tails[1].detach()
        support = support & (tail_b <= LARGEST_LOGP) & (tail_p <= LARGEST_LOGP)
        all_b, all_p = all_b + tail_b.exp(), all_p + tail_p.exp()
    judged = usable & support
    return {
        "support": support,
        "mass": ~judged | (_at_most_one(all_b, cells.log_b) & _at_most_one(all_p, cells.log_p)),
        "column": ~judged | ~cells.has_sampled | _same_logp(cells.sampled_p, logp),
    }


def resolution_of(*logp: Tensor) -> float:
    """Returns the smallest 1 − p that log-probs in these dtypes can express."""
    return max(torch.finfo(x.dtype).eps for x in (*logp, FINEST_RECORD))


def largest_mass(num_cells: int, unit_roundoff: float) -> float:
    r"""Returns the largest sum that the probabilities of distinct ids can have after rounding.

        Σ ≤ n^u · exp(1e-3),   n cells, unit roundoff u

    A log-prob stored with unit roundoff u is ℓ·(1 + θ) with |θ| ≤ u, so a probability p becomes at most p^(1−u), and
    n of them that sum to 1 become at most n^u (equal ones are the worst case). exp(1e-3) is the excess that one
    log-prob may have. For 64 ids: 1.001 for float32 numbers, 1.018 for bfloat16 ones.
    """
    return math.exp(LARGEST_LOGP + math.log(max(num_cells, 1)) * unit_roundoff)


def is_coarse(logp: Float[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
    """Flags numbers that fit 11 significant bits, as every bfloat16 and float16 number does.

    Trainers often compute in bfloat16 and pass float32, so the numbers show how they were rounded and the dtype does
    not. A float32 number fits by chance once in 8,192.
    """
    return (logp.detach().to(torch.float32).contiguous().view(torch.int32) & LOW_BITS) == 0


def _at_most_one(mass: Tensor, columns: Tensor) -> Bool[Tensor, " n"]:
    num_cells = columns.shape[-1] + 2  # the sampled token and the tail are cells too
    coarse, fine = (largest_mass(num_cells, u) for u in (COARSE_ROUNDOFF, FINE_ROUNDOFF))
    return mass <= either(is_coarse(columns).all(-1), coarse, fine, like=mass)


def _same_logp(column: Tensor, logp: Tensor) -> Bool[Tensor, " n"]:
    """Compares two records of one log-prob. Each was rounded once, so |ℓ₁ − ℓ₂| ≤ 2u·|ℓ| + 1e-3."""
    coarse = is_coarse(column) | is_coarse(logp)
    slack = either(coarse, 2 * COARSE_ROUNDOFF, 2 * FINE_ROUNDOFF, like=logp)
    return (column - logp).abs() <= slack * logp.abs() + LARGEST_LOGP


def _all(good: dict[str, Tensor]) -> Bool[Tensor, " n"]:
    first, *others = good.values()
    for flags in others:
        first = first & flags
    return first


def _plausible(logp: Tensor) -> Bool[Tensor, " n"]:
    """Flags rows without NaN and without log-probs above 0 by more than rounding. −inf is an empty cell."""
    return logp.detach().amax(-1) <= LARGEST_LOGP  # amax propagates NaN, and NaN compares False


def _narrow(topk: TopK, own: Tensor, k: int) -> tuple[TopK, Tensor]:
    """Keeps the k most probable of the recorded columns. The others join the tail."""
    keep = topk.logp.masked_fill(~topk.valid, -torch.inf).topk(k, dim=-1).indices
    # The recorded tail no longer fits, so both tails are derived from the columns.
    return TopK(topk.ids.gather(-1, keep), topk.logp.gather(-1, keep), topk.of), own.gather(-1, keep)


def _selected(
    topk: TopK, own: Tensor, policy: PolicyTokens, rollout: RolloutTokens, tail_mass: float
) -> tuple[TopK, Tensor, PolicyTokens]:
    """Returns both sides after TROLL's published selection: each policy's top ids up to a mass of 1 − tail_mass.

    At ids that only the anchor keeps, the policy is a constant 1e-12 without gradient. The sampled token keeps its
    value.
    """
    theirs = policy.topk
    assert theirs is not None  # `require_fields` has checked it
    assert rollout.token_ids is not None
    theirs = TopK(theirs.ids.masked_fill(~_top_mass(theirs, tail_mass), -1), theirs.logp, theirs.of)
    topk = TopK(topk.ids.masked_fill(~_top_mass(topk, tail_mass), -1), topk.logp, topk.of)
    shared = (topk.ids.unsqueeze(-1) == theirs.ids.unsqueeze(-2)).any(-1)
    kept = shared | (topk.ids == rollout.token_ids.unsqueeze(-1))
    own = torch.where(kept, own, own.new_full((), math.log(FILL)))
    return topk, own, replace(policy, topk=theirs, topk_anchor_logp=None)


def _top_mass(topk: TopK, tail_mass: float) -> Bool[Tensor, "*batch k"]:
    """Flags the most probable columns that hold a mass of 1 − tail_mass, or all of them if they hold less."""
    p, order = topk.logp.detach().double().exp().masked_fill(~topk.valid, 0.0).sort(dim=-1, descending=True)
    before = p.cumsum(-1) - p
    return torch.zeros_like(topk.valid).scatter(-1, order, before < 1 - tail_mass) & topk.valid


def _join_own_topk(topk: TopK, own: Tensor, policy: PolicyTokens, *, fill: bool) -> tuple[TopK, Tensor]:
    """Adds the policy's own top ids to the recorded columns, each id once, where the anchor is known or filled."""
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

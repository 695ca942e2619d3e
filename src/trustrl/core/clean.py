"""Conversion of records to clean tokens: one flat row in float64, with faulty tokens blanked and counted.

Later code may assume that no value is NaN or infinite, except the −inf log-mass of an empty cell. Blanking happens
before any arithmetic: `0 * inf` is NaN, and a `where` afterwards does not undo it in the backward pass.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config.axes import Needs
from trustrl.config.statistics import Anchor
from trustrl.core.numerics import verdict_dtype
from trustrl.core.partition import (
    LARGEST_LOGP,
    CellSums,
    Partition,
    resolution_of,
    topk_partition,
    vocabulary_partition,
)
from trustrl.core.records import FullDivergence, PolicyTokens, RolloutTokens, check_pair
from trustrl.core.sequences import Sequences, rows_as_sequences, sequences_of
from trustrl.errors import MissingDataError, RecordError
from trustrl.kernels.logprob_outputs import wide_dtype

OnNonFinite = Literal["drop", "zero", "raise"]

LARGEST_DIVERGENCE = {"tv": 1 + LARGEST_LOGP, "kl": math.inf}
"""Largest valid value of a divergence computed elsewhere, with rounding."""


@dataclass(frozen=True, slots=True)
class CleanTokens:
    """Clean tokens in one flat row of n."""

    logp: Float[Tensor, " n"]
    """log π with gradient, in the dtype of the loss; 0 on unusable tokens."""

    log_policy: Float[Tensor, " n"]
    """log π, detached, at most 0."""

    log_anchor: Float[Tensor, " n"]
    """log b, at most 0."""

    anchor: Anchor
    """b: the policy of `log_anchor`."""

    log_ratio: Float[Tensor, " n"]
    """log π − log b."""

    resolution: float
    """Smallest 1 − π and 1 − b that these log-probs can express."""

    largest_term: float
    """Largest term and coefficient that are not dropped; see `largest_term`."""

    advantage: Float[Tensor, " n"]

    in_loss: Bool[Tensor, " n"]
    """Tokens that denominators count."""

    usable: Bool[Tensor, " n"]
    """Tokens in the loss without a fault. Only these may carry a gradient."""

    counted: Bool[Tensor, " n"]
    """Tokens that sequence means, maxima and budgets run over."""

    log_mismatch: Float[Tensor, " n"] | None
    """log π' − log μ if both are recorded. NaN where the region reads only one of them and the other is faulty."""

    sequences: Sequences | None
    """Assignment to sequences. None if tokens are ungrouped, or if rows are sequences and the region reads none."""

    partition: Partition | CellSums | None
    full_divergence: FullDivergence | None
    faults: dict[str, Float[Tensor, ""]]
    """Number of tokens in the loss with each kind of fault."""

    staleness: Float[Tensor, " n"] | None = None
    """Age of each token in weight versions, 0 on unusable tokens. None if the records lack versions."""

    num_rows: int | None = None
    """Number of rows if each row is a sequence."""

    tightening: Float[Tensor, " n"] | None = None
    """Divisor ≥ 1 of each token's bound, if the region tightens the bounds of stale tokens."""

    @property
    def grouped(self) -> Sequences:
        """The sequences, for regions whose needs include them."""
        assert self.sequences is not None
        return self.sequences


def clean_tokens(
    policy: PolicyTokens, rollout: RolloutTokens, needs: Needs, *, on_nonfinite: OnNonFinite = "drop"
) -> CleanTokens:
    """Returns the tokens that a region decides on.

    Args:
        policy: The policy's log-probs.
        rollout: The sampled tokens.
        needs: Data that the region reads. Nothing else is checked.
        on_nonfinite: `drop` removes a faulty token from the loss and from its sequence's statistics. `zero` removes it
            from the loss and counts it in its sequence as a token that did not move. `raise` is `drop` here; the
            caller raises later, from the sums.

    Raises:
        MissingDataError: If the records lack data in `needs`.
        RecordError: If the records do not fit each other.
    """
    check_pair(policy, rollout)
    require_fields(policy, rollout, needs)
    double = verdict_dtype(policy.logp)

    def flat(x: Tensor) -> Tensor:
        return x.detach().reshape(-1).to(double)

    anchor_logp = getattr(rollout, f"{needs.anchor}_logp")
    in_loss = rollout.in_loss.reshape(-1)
    raw = {"policy": flat(policy.logp), "advantage": flat(advantage_per_token(rollout))}
    for name, logp in (("behavior", rollout.behavior_logp), ("proximal", rollout.proximal_logp)):
        if logp is not None and name in needs.anchors:
            raw[name] = flat(logp)
    faults: dict[str, Tensor] = {}
    usable = in_loss

    def keep_only(name: str, good: Tensor) -> None:
        nonlocal usable
        faults[name] = torch.count_nonzero(in_loss & ~good).to(double)
        usable = usable & good

    for name, x in raw.items():
        keep_only(name, x.abs() < torch.inf if name == "advantage" else possible(x))
    partition = full_divergence = None
    if needs.full and policy.full_divergence is not None and not needs.projects:
        full_divergence, good = clean_divergence(policy.full_divergence)
        keep_only("support", good)
    elif needs.full or needs.topk:
        make = vocabulary_partition if needs.full else topk_partition
        partition, masks = make(policy, rollout, needs, usable, raw[needs.anchor])
        for name, good in masks.items():
            keep_only(name, good)

    clean = {name: torch.where(usable, x, 0.0) for name, x in raw.items()}
    log_mismatch = None
    if rollout.behavior_logp is not None and rollout.proximal_logp is not None:
        both = [flat(x) for x in (rollout.proximal_logp, rollout.behavior_logp)]
        known = usable & possible(both[0]) & possible(both[1])
        log_mismatch = torch.where(known, both[0] - both[1], torch.where(usable, torch.nan, 0.0))
    staleness = None
    if rollout.version is not None and policy.version is not None:
        staleness = torch.where(usable, flat(policy.version - rollout.version), 0.0)
    num_rows = rows_as_sequences(rollout)
    return CleanTokens(
        logp=torch.where(usable, policy.logp.reshape(-1).to(wide_dtype(policy.logp)), 0.0),
        log_policy=clean["policy"].clamp(max=0.0),
        log_anchor=clean[needs.anchor].clamp(max=0.0),
        anchor=needs.anchor,
        log_ratio=clean["policy"] - clean[needs.anchor],
        resolution=resolution_of(policy.logp, anchor_logp),
        largest_term=largest_term(policy.logp.dtype),
        advantage=clean["advantage"],
        in_loss=in_loss,
        usable=usable,
        counted=in_loss if on_nonfinite == "zero" else usable,
        log_mismatch=log_mismatch,
        sequences=sequences_of(rollout) if needs.sequences or num_rows is None else None,
        partition=partition,
        full_divergence=full_divergence,
        faults=faults,
        staleness=staleness,
        num_rows=num_rows,
    )


def largest_term(dtype: torch.dtype) -> float:
    """Returns the largest term that is not dropped, for log-probs that arrive in `dtype`.

    Below it, a sum of ten million terms does not overflow the loss, which is float32 or wider. Nor does the gradient
    that a term and a penalty hand back in `dtype`: half of 65,504 for float16.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return min(torch.finfo(wide).max * 1e-7, torch.finfo(dtype).max / 2)


def possible(logp: Float[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
    """Flags values that the log-prob of a sampled token can have: finite, and at most 0 up to rounding."""
    return (logp > -torch.inf) & (logp <= LARGEST_LOGP)


def advantage_per_token(rollout: RolloutTokens) -> Float[Tensor, "*batch"]:
    """Returns the advantages in the shape of the batch, from advantages per token or per sequence."""
    advantage, shape = rollout.advantage, rollout.in_loss.shape
    if not rollout.in_loss.numel():
        return advantage.new_zeros(shape)
    return advantage if len(shape) == 1 else advantage.reshape(shape[0], -1).expand(shape)


def require_fields(policy: PolicyTokens, rollout: RolloutTokens, needs: Needs) -> None:
    """Raises if the records lack data that a region needs. There is no fallback to other data."""
    for anchor in sorted(needs.anchors):
        if getattr(rollout, f"{anchor}_logp") is None:
            raise MissingDataError(
                f"RolloutTokens.{anchor}_logp must be given: this region is anchored on the {anchor} policy, got None. "
                "Record it, or set the region's anchor to the other policy."
            )
    if needs.sequences and rollout.in_loss.ndim == 1 and rollout.sequence_ids is None:
        raise MissingDataError(
            "RolloutTokens.sequence_ids must be given with packed tokens: this region or reduction uses whole "
            "sequences, got None."
        )
    given_exactly = needs.full and not needs.projects and policy.full_divergence is not None
    if (needs.topk or needs.full) and not given_exactly and rollout.token_ids is None:
        raise MissingDataError(
            "RolloutTokens.token_ids must be given: this region locates the sampled token among other ids, got None."
        )
    if needs.topk:
        _require_topk(policy, rollout, needs)
    if needs.full:
        _require_full(policy, rollout, needs)


def _require_topk(policy: PolicyTokens, rollout: RolloutTokens, needs: Needs) -> None:
    if rollout.topk is None or policy.topk_logp is None:
        missing = "RolloutTokens.topk" if rollout.topk is None else "PolicyTokens.topk_logp"
        raise MissingDataError(
            f"{missing} must be given: this region compares the {needs.anchor} policy's top {needs.topk} ids, got "
            "None. Record them at sampling time and gather the policy's log-probs there, or use a binary divergence."
        )
    if rollout.topk.of != needs.anchor:
        raise MissingDataError(
            f"RolloutTokens.topk must be the {needs.anchor} policy's, got the {rollout.topk.of} policy's. "
            "Record the top-K of the region's anchor, or change the region's anchor."
        )
    if needs.own_topk == "published" and policy.topk is None:
        raise MissingDataError(
            f"PolicyTokens.topk must be given: this region reads the policy's own top {needs.topk} ids, got None. "
            "Record them, or use rest='bucket'."
        )
    width = rollout.topk.ids.shape[-1]
    if width < needs.topk and needs.tail_mass == 0:
        raise RecordError(
            f"RolloutTokens.topk must be at least k = {needs.topk} columns wide, got {width}. "
            f"Record more ids, or set the region's k to {width} if the vocabulary has {width} ids."
        )


def _require_full(policy: PolicyTokens, rollout: RolloutTokens, needs: Needs) -> None:
    if policy.full_divergence is not None and not needs.projects:
        of = policy.full_divergence.of
    elif rollout.full is None or policy.full_logp is None:
        missing = "RolloutTokens.full" if rollout.full is None else "PolicyTokens.full_logp"
        raise MissingDataError(
            f"{missing} must be given: this region compares the whole vocabulary, got None. "
            "Pass both sides' log-probs, or PolicyTokens.full_divergence for a region that does not project, or use a "
            "Top-K region."
        )
    else:
        of = rollout.full.of
    if of != needs.anchor:
        raise MissingDataError(
            f"The full distribution must be the {needs.anchor} policy's, got the {of} policy's. "
            "Pass the distribution of the region's anchor, or change the region's anchor."
        )


def clean_divergence(divergence: FullDivergence) -> tuple[FullDivergence, Bool[Tensor, " n"]]:
    """Flattens a divergence computed elsewhere. NaN, negative values and a TV above 1 up to rounding are faults."""
    flat: dict[str, Tensor] = {}
    good: Tensor | None = None
    for name, most in LARGEST_DIVERGENCE.items():
        x: Tensor | None = getattr(divergence, name)
        if x is not None:
            flat[name] = x.detach().reshape(-1).to(verdict_dtype(x))
            fine = (flat[name] >= 0) & (flat[name] <= most)
            good = fine if good is None else good & fine
    if good is None:
        raise MissingDataError("PolicyTokens.full_divergence must hold tv or kl, got neither.")
    return FullDivergence(of=divergence.of, **flat), good

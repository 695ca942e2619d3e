"""From records to clean tokens: one flat row, blanked, upcast, every fault found and counted.

Everything downstream may assume that no value here is NaN or infinite except a deliberate −inf log-mass of an empty
cell. Blanking happens before any arithmetic: `0 * inf` is NaN, and a `where` after the fact does not undo it in the
backward pass.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.cells import LARGEST_LOGP, Cells, resolution_of, topk_cells, vocabulary_cells
from trustrl.config.axes import Needs
from trustrl.errors import MissingDataError, RecordError
from trustrl.kernels.outputs import wide_dtype
from trustrl.numerics import verdict_dtype
from trustrl.records import FullDivergence, PolicyTokens, RolloutTokens, check_pair

OnNonFinite = Literal["drop", "zero", "raise"]

LARGEST_DIVERGENCE = {"tv": 1 + LARGEST_LOGP, "kl": math.inf}
"""What a divergence made elsewhere may be; a TV above 1, but for rounding, is none."""


class Sequences(NamedTuple):
    """Which tokens belong together."""

    of_token: Int[Tensor, " n"]
    """A sequence number in [0, num) for each token."""

    num: int
    """An upper bound on the number of sequences, known without looking at the data."""

    order: Int[Tensor, " n"] | None
    """A permutation that puts each sequence's tokens side by side in time order; None when they already are."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Clean tokens in one flat row of n."""

    logp: Float[Tensor, " n"]
    """log π with gradient, in the loss's dtype; 0 where not usable."""

    log_policy: Float[Tensor, " n"]
    """log π, detached, at most 0."""

    log_anchor: Float[Tensor, " n"]
    """log b, at most 0."""

    log_ratio: Float[Tensor, " n"]
    """log π − log b."""

    resolution: float
    """The smallest 1 − π and 1 − b that these log-probs can express."""

    advantage: Float[Tensor, " n"]

    in_loss: Bool[Tensor, " n"]
    """What denominators count."""

    usable: Bool[Tensor, " n"]
    """In the loss and free of faults: what may carry a gradient."""

    counted: Bool[Tensor, " n"]
    """What sequence means, maxima and budgets run over."""

    log_mismatch: Float[Tensor, " n"] | None
    """log π' − log μ, where both are recorded; NaN where the region reads only one of them and the other is a fault."""

    sequences: Sequences | None
    cells: Cells | None
    full_divergence: FullDivergence | None
    faults: dict[str, Float[Tensor, ""]]
    """How many tokens in the loss had each kind of fault."""


def clean_tokens(
    policy: PolicyTokens, rollout: RolloutTokens, needs: Needs, *, on_nonfinite: OnNonFinite = "drop"
) -> Tokens:
    """The tokens a region decides on.

    Args:
        policy: The policy's side.
        rollout: The sampler's side.
        needs: What the region reads; nothing else is touched.
        on_nonfinite: `drop` takes a faulty token out of the loss and out of its sequence's statistics; `zero` takes it
            out of the loss and lets it count in its sequence as a token that did not move; `raise` is `drop` here, and
            raises later, from the sums.

    Raises:
        MissingDataError: the records lack something in `needs`.
        RecordError: the records do not fit each other.
    """
    check_pair(policy, rollout)
    require(policy, rollout, needs)
    double = verdict_dtype(policy.logp)

    def flat(x: Tensor) -> Tensor:
        return x.detach().reshape(-1).to(double)

    anchor_logp = getattr(rollout, f"{needs.anchor}_logp")
    in_loss = rollout.in_loss.reshape(-1)
    raw = {"policy": flat(policy.logp), "advantage": flat(advantage_per_token(rollout))}
    for name, logp in (("behavior", rollout.behavior_logp), ("proximal", rollout.proximal_logp)):
        if logp is not None and name in needs.anchors:
            raw[name] = flat(logp)
    faults = {}
    usable = in_loss

    def keep_only(name: str, good: Tensor) -> None:
        nonlocal usable
        faults[name] = torch.count_nonzero(in_loss & ~good).to(double)
        usable = usable & good

    for name, x in raw.items():
        keep_only(name, x.abs() < torch.inf if name == "advantage" else possible(x))
    cells = full_divergence = None
    if needs.full and policy.full_divergence is not None and not needs.projects:
        full_divergence, good = _clean_divergence(policy.full_divergence)
        keep_only("support", good)
    elif needs.full or needs.topk:
        make = vocabulary_cells if needs.full else topk_cells
        cells, found = make(policy, rollout, needs, usable, raw[needs.anchor])
        for name, good in found.items():
            keep_only(name, good)

    clean = {name: torch.where(usable, x, 0.0) for name, x in raw.items()}
    log_mismatch = None
    if rollout.behavior_logp is not None and rollout.proximal_logp is not None:
        both = [flat(x) for x in (rollout.proximal_logp, rollout.behavior_logp)]
        known = usable & possible(both[0]) & possible(both[1])
        log_mismatch = torch.where(known, both[0] - both[1], torch.where(usable, torch.nan, 0.0))
    return Tokens(
        logp=torch.where(usable, policy.logp.reshape(-1).to(wide_dtype(policy.logp)), 0.0),
        log_policy=clean["policy"].clamp(max=0.0),
        log_anchor=clean[needs.anchor].clamp(max=0.0),
        log_ratio=clean["policy"] - clean[needs.anchor],
        resolution=resolution_of(policy.logp, anchor_logp),
        advantage=clean["advantage"],
        in_loss=in_loss,
        usable=usable,
        counted=in_loss if on_nonfinite == "zero" else usable,
        log_mismatch=log_mismatch,
        sequences=sequences_of(rollout),
        cells=cells,
        full_divergence=full_divergence,
        faults=faults,
    )


def possible(logp: Float[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
    """True on finite numbers that are at most 0, but for rounding: what a sampled token's log-prob can be."""
    return (logp > -torch.inf) & (logp <= LARGEST_LOGP)


def advantage_per_token(rollout: RolloutTokens) -> Float[Tensor, "*batch"]:
    """The advantages in the batch's own shape, whether they came per token or per sequence."""
    advantage, shape = rollout.advantage, rollout.in_loss.shape
    if not rollout.in_loss.numel():
        return advantage.new_zeros(shape)
    return advantage if len(shape) == 1 else advantage.reshape(shape[0], -1).expand(shape)


def require(policy: PolicyTokens, rollout: RolloutTokens, needs: Needs) -> None:
    """Refuses records that lack what a region needs; never falls back to something else.

    Raises:
        MissingDataError: with the field to fill.
    """
    for anchor in sorted(needs.anchors):
        if getattr(rollout, f"{anchor}_logp") is None:
            raise MissingDataError(
                f"RolloutTokens.{anchor}_logp must be given: this region is anchored on the {anchor} policy, got None. "
                "Record it, or choose the other anchor by name; there is no silent fallback."
            )
    if needs.sequences and rollout.in_loss.ndim == 1 and rollout.sequence_ids is None:
        raise MissingDataError(
            "RolloutTokens.sequence_ids must be given with packed tokens: this region or reduction looks at whole "
            "sequences, got None."
        )
    given_exactly = needs.full and not needs.projects and policy.full_divergence is not None
    if (needs.topk or needs.full) and not given_exactly and rollout.token_ids is None:
        raise MissingDataError(
            "RolloutTokens.token_ids must be given: the sampled token has to be found among the other ids, got None."
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
            "Record the top-K of the region's own anchor, or change the region's anchor."
        )
    width = rollout.topk.ids.shape[-1]
    if width < needs.topk and needs.tail_mass == 0:
        raise RecordError(
            f"RolloutTokens.topk must be at least k = {needs.topk} columns wide, got {width}. "
            f"Record more ids, or set the region's k to {width} (a vocabulary of {width} words has no more)."
        )


def _require_full(policy: PolicyTokens, rollout: RolloutTokens, needs: Needs) -> None:
    if policy.full_divergence is not None and not needs.projects:
        of = policy.full_divergence.of
    elif rollout.full is None or policy.full_logp is None:
        missing = "RolloutTokens.full" if rollout.full is None else "PolicyTokens.full_logp"
        raise MissingDataError(
            f"{missing} must be given: this region compares the whole vocabulary, got None. "
            "Give both sides' log-probs, or PolicyTokens.full_divergence where nothing is projected, or a region on "
            "the top K."
        )
    else:
        of = rollout.full.of
    if of != needs.anchor:
        raise MissingDataError(
            f"The full distribution must be the {needs.anchor} policy's, got the {of} policy's. "
            "Give the region's own anchor, or change the region's anchor."
        )


def sequences_of(rollout: RolloutTokens) -> Sequences | None:
    """How the flat tokens group into sequences; None for packed tokens without `sequence_ids`."""
    mask, ids = rollout.in_loss, rollout.sequence_ids
    if ids is None:
        if mask.ndim == 1:
            return None
        rows, width = mask.shape
        index = torch.arange(rows, device=mask.device).unsqueeze(1).expand(rows, width).reshape(-1)
        return Sequences(index, rows, None)
    ids = ids.reshape(-1)
    ordered, order = ids.sort(stable=True)
    starts = torch.zeros_like(ordered)
    starts[1:] = (ordered[1:] != ordered[:-1]).to(starts.dtype)
    index = torch.zeros_like(order).scatter(0, order, starts.cumsum(0))
    return Sequences(index, ids.shape[0], order)


def _clean_divergence(given: FullDivergence) -> tuple[FullDivergence, Bool[Tensor, " n"]]:
    """A divergence made elsewhere, flat; NaN, negative values and a TV above 1, but for rounding, are faults."""
    flat = {}
    good = None
    for name, most in LARGEST_DIVERGENCE.items():
        x = getattr(given, name)
        if x is not None:
            flat[name] = x.detach().reshape(-1).to(verdict_dtype(x))
            fine = (flat[name] >= 0) & (flat[name] <= most)
            good = fine if good is None else good & fine
    if good is None:
        raise MissingDataError("PolicyTokens.full_divergence must hold tv or kl, got neither.")
    return FullDivergence(of=given.of, **flat), good

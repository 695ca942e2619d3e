"""`check`: validates the values in records, for start-up and for debugging. Waits for the device."""

import torch
from torch import Tensor

from trustrl.config.axes import Needs, Region
from trustrl.core.clean import LARGEST_DIVERGENCE, advantage_per_token, clean_tokens, possible, require_fields
from trustrl.core.metrics import FAULTS, MOSTLY_DROPPED
from trustrl.core.numerics import verdict_dtype
from trustrl.core.partition import LARGEST_LOGP, topk_partition, vocabulary_partition
from trustrl.core.records import PolicyTokens, RolloutTokens, check_pair
from trustrl.errors import NonFiniteError, RecordError
from trustrl.kernels.id_columns import first_of_its_id

SAME_TOKEN = 0.05
"""Largest difference, in nats, between a sampled token's log-prob and the top-K's entry for the same id."""


def check(policy: PolicyTokens, rollout: RolloutTokens, region: Region | None = None) -> None:
    """Raises if values at tokens in the loss cannot be right. Lists all non-finite fields at once.

    Raises:
        NonFiniteError: If a value is NaN or infinite, or a log-prob is above 0.
        RecordError: If ids are repeated or negative, if probabilities sum to more than 1, if the top-K contradicts the
            sampled token's log-prob, or if the given region would drop most tokens.
        MissingDataError: If the records lack data that the given region needs.
    """
    check_pair(policy, rollout)
    if region is not None:
        require_fields(policy, rollout, region.needs())
    in_loss = rollout.in_loss
    wrong: list[str] = []
    of_tokens = {
        "PolicyTokens.logp": policy.logp,
        "RolloutTokens.behavior_logp": rollout.behavior_logp,
        "RolloutTokens.proximal_logp": rollout.proximal_logp,
        "RolloutTokens.reference_logp": rollout.reference_logp,
    }
    for name, x in of_tokens.items():
        if x is not None:
            wrong += _describe(name, ~possible(x), in_loss, "finite and at most 0")
    # In these fields −inf is an empty cell, not a fault.
    topk, own = rollout.topk, policy.topk
    of_support = {
        "RolloutTokens.topk.logp": None if topk is None else _counting(topk.logp, topk.valid),
        "RolloutTokens.topk.tail_logp": None if topk is None else topk.tail_logp,
        "PolicyTokens.topk_logp": policy.topk_logp if topk is None else _counting(policy.topk_logp, topk.valid),
        "PolicyTokens.tail_logp": policy.tail_logp,
        "RolloutTokens.full.logp": None if rollout.full is None else rollout.full.logp,
        "PolicyTokens.full_logp": policy.full_logp,
        "PolicyTokens.topk.logp": None if own is None else _counting(own.logp, own.valid),
        "PolicyTokens.topk_anchor_logp": policy.topk_anchor_logp,
    }
    for name, x in of_support.items():
        if x is not None:
            wrong += _describe(name, ~(x <= LARGEST_LOGP), in_loss, "a log-prob")
    exact = policy.full_divergence
    for name, most in LARGEST_DIVERGENCE.items():
        x = None if exact is None else getattr(exact, name)
        if x is not None:
            bad, rule = ~((x >= 0) & (x <= most)), "in [0, 1]" if name == "tv" else "≥ 0"
            wrong += _describe(f"PolicyTokens.full_divergence.{name}", bad, in_loss, rule)
    if policy.entropy is not None:
        wrong += _describe("PolicyTokens.entropy", ~policy.entropy.isfinite(), in_loss, "finite")
    wrong += _describe("RolloutTokens.advantage", ~advantage_per_token(rollout).isfinite(), in_loss, "finite")
    if wrong:
        raise NonFiniteError(" ".join(wrong) + " The loss would drop and count these tokens.")
    _check_ids(rollout)
    _check_cells(policy, rollout)
    if region is not None:
        _check_dropped(policy, rollout, region)


def _counting(logp: Tensor | None, valid: Tensor) -> Tensor | None:
    """Sets columns that do not count to 0, which is not a fault."""
    return None if logp is None else logp.masked_fill(~valid, 0.0)


def _describe(name: str, bad: Tensor, in_loss: Tensor, rule: str) -> list[str]:
    while bad.ndim > in_loss.ndim:
        bad = bad.any(-1)
    bad = bad & in_loss
    count = int(bad.sum())
    if not count:
        return []
    where = tuple(int(index) for index in bad.nonzero()[0])
    return [f"{name} must be {rule} at tokens in the loss, got {count} tokens where it is not, the first at {where}."]


def _check_ids(rollout: RolloutTokens) -> None:
    token, topk = rollout.token_ids, rollout.topk
    if token is not None and bool(((token < 0) & rollout.in_loss).any()):
        raise RecordError(
            "RolloutTokens.token_ids must be ≥ 0 at tokens in the loss, got a negative id. Mask padding out of in_loss."
        )
    if topk is None:
        return
    repeated = (topk.ids >= 0) & ~first_of_its_id(topk.ids) & rollout.in_loss.unsqueeze(-1)
    if bool(repeated.any()):
        raise RecordError(
            "RolloutTokens.topk.ids must be distinct per token, got a repeated id. Mark empty columns with -1."
        )
    anchor = rollout.behavior_logp if topk.of == "behavior" else rollout.proximal_logp
    if token is None or anchor is None:
        return
    same = topk.valid & (topk.ids == token.unsqueeze(-1)) & rollout.in_loss.unsqueeze(-1)
    gap = torch.where(same, (topk.logp - anchor.unsqueeze(-1)).abs(), 0.0)
    if bool((gap > SAME_TOKEN).any()):
        raise RecordError(
            f"RolloutTokens.{topk.of}_logp must agree with the top-K's entry for the same id, got a difference of "
            f"{float(gap.max()):.3f} nats. Engines asked for K log-probs may return the most probable token "
            "first: select the sampled token by its id."
        )


_CELL_RULES = {
    "mass": (
        "{side} must sum to at most 1 over each token's ids, on both sides",
        "Pass log-probs, not logits, of distinct ids, at the temperature of the sampled token's log-prob.",
    ),
    "column": (
        "{side} must equal PolicyTokens.logp at the sampled id",
        "Take both from one forward pass at one temperature, column by column at the ids of the rollout.",
    ),
}


def _check_cells(policy: PolicyTokens, rollout: RolloutTokens) -> None:
    """Applies the loss's rules on probability mass and on the sampled id's column."""
    supports = (
        ("PolicyTokens.topk_logp", topk_partition, rollout.topk, policy.topk_logp),
        ("PolicyTokens.full_logp", vocabulary_partition, rollout.full, policy.full_logp),
    )
    for side, make, recorded, own in supports:
        anchor = None if recorded is None else getattr(rollout, f"{recorded.of}_logp")
        if recorded is None or own is None or anchor is None or rollout.token_ids is None:
            continue
        needs = Needs(anchors=frozenset({recorded.of}), anchor=recorded.of, topk=own.shape[-1])
        in_loss = rollout.in_loss
        flat = anchor.detach().reshape(-1).to(verdict_dtype(anchor))
        _, good = make(policy, rollout, needs, in_loss.reshape(-1), flat)
        for name, (rule, advice) in _CELL_RULES.items():
            bad = in_loss & ~good[name].reshape(in_loss.shape)
            if bool(bad.any()):
                where = tuple(int(index) for index in bad.nonzero()[0])
                raise RecordError(
                    f"{rule.format(side=side)}, got {int(bad.sum())} tokens in the loss that violate this, the "
                    f"first at {where}. {advice}"
                )


def _check_dropped(policy: PolicyTokens, rollout: RolloutTokens, region: Region) -> None:
    """Raises if the region would drop most tokens of this batch."""
    tokens = clean_tokens(policy, rollout, region.needs())
    num_tokens = int(tokens.in_loss.sum())
    share = 1 - int(tokens.usable.sum()) / max(num_tokens, 1)
    if num_tokens and share > MOSTLY_DROPPED:
        faults = [f"{FAULTS[name]} ({int(count)} tokens)" for name, count in tokens.faults.items() if int(count)]
        raise RecordError(
            f"{region.kind} must keep most tokens in the loss, but it would drop {share:.0%}: {'; '.join(faults)}."
        )

"""A look at the values themselves, for start-up and for whoever is on call. It waits for the device."""

import torch
from torch import Tensor

from trustrl.cells import LARGEST_LOGP, topk_cells, vocabulary_cells
from trustrl.config.axes import Needs, Region
from trustrl.errors import NonFiniteError, RecordError
from trustrl.kernels.outputs import first_of_its_id
from trustrl.metrics import FAULTS, MOSTLY_DROPPED
from trustrl.numerics import verdict_dtype
from trustrl.records import PolicyTokens, RolloutTokens, check_pair
from trustrl.tokens import LARGEST_DIVERGENCE, advantage_per_token, clean_tokens, possible, require

SAME_TOKEN = 0.05
"""How many nats a sampled token's own log-prob may differ from the top-K's entry for the same id."""


def check(policy: PolicyTokens, rollout: RolloutTokens, region: Region | None = None) -> None:
    """Raises on values that cannot be right at tokens in the loss, all of them named at once.

    Raises:
        NonFiniteError: NaN, infinite, or log-probs above 0.
        RecordError: repeated or negative ids, probabilities that sum to more than 1, a top-K that contradicts the
            sampled token's own log-prob, or, with a region, a batch of which it would drop most tokens.
        MissingDataError: with a region, what it needs and the records lack.
    """
    check_pair(policy, rollout)
    if region is not None:
        require(policy, rollout, region.needs())
    in_loss = rollout.in_loss
    wrong = []
    of_tokens = {
        "PolicyTokens.logp": policy.logp,
        "RolloutTokens.behavior_logp": rollout.behavior_logp,
        "RolloutTokens.proximal_logp": rollout.proximal_logp,
        "RolloutTokens.reference_logp": rollout.reference_logp,
    }
    for name, x in of_tokens.items():
        if x is not None:
            wrong += _describe(name, ~possible(x), in_loss, "finite and at most 0")
    # Elsewhere −inf is an empty cell, and no fault.
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
        raise NonFiniteError(" ".join(wrong) + " The loss would leave these out and count them.")
    _check_ids(rollout)
    _check_cells(policy, rollout)
    if region is not None:
        _check_dropped(policy, rollout, region)


def _counting(logp: Tensor | None, valid: Tensor) -> Tensor | None:
    """The columns that count; 0, which is no fault, in the others."""
    return None if logp is None else logp.masked_fill(~valid, 0.0)


def _describe(name: str, bad: Tensor, in_loss: Tensor, rule: str) -> list[str]:
    while bad.ndim > in_loss.ndim:
        bad = bad.any(-1)
    bad = bad & in_loss
    count = int(bad.sum())
    if not count:
        return []
    where = tuple(bad.nonzero()[0].tolist())
    return [f"{name} must be {rule} at tokens in the loss, got {count} that are not, the first at {where}."]


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
            f"{float(gap.max()):.3f} nats. Engines that are asked for K log-probs may put the most probable token "
            "first, not the sampled one: look the sampled id up."
        )


_CELL_RULES = {
    "mass": (
        "{side} must sum to at most 1 over each token's ids, on both sides",
        "Give log-probs, not logits, of distinct ids, at the temperature of the sampled token's log-prob.",
    ),
    "column": (
        "{side} must equal PolicyTokens.logp at the sampled id",
        "Take both from one forward pass at one temperature, column by column at the ids of the rollout.",
    ),
}


def _check_cells(policy: PolicyTokens, rollout: RolloutTokens) -> None:
    """Applies the loss's own rules on probability mass and on the sampled id's column."""
    supports = (
        ("PolicyTokens.topk_logp", topk_cells, rollout.topk, policy.topk_logp),
        ("PolicyTokens.full_logp", vocabulary_cells, rollout.full, policy.full_logp),
    )
    for side, make, given, own in supports:
        anchor = None if given is None else getattr(rollout, f"{given.of}_logp")
        if given is None or own is None or anchor is None or rollout.token_ids is None:
            continue
        needs = Needs(anchors=frozenset({given.of}), anchor=given.of, topk=own.shape[-1])
        in_loss = rollout.in_loss
        flat = anchor.detach().reshape(-1).to(verdict_dtype(anchor))
        _, good = make(policy, rollout, needs, in_loss.reshape(-1), flat)
        for name, (rule, advice) in _CELL_RULES.items():
            bad = in_loss & ~good[name].reshape(in_loss.shape)
            if bool(bad.any()):
                where = tuple(bad.nonzero()[0].tolist())
                raise RecordError(
                    f"{rule.format(side=side)}, got {int(bad.sum())} tokens in the loss where this does not hold, the "
                    f"first at {where}. {advice}"
                )


def _check_dropped(policy: PolicyTokens, rollout: RolloutTokens, region: Region) -> None:
    """Raises if the region would drop most tokens of this batch."""
    tokens = clean_tokens(policy, rollout, region.needs())
    num_tokens = int(tokens.in_loss.sum())
    share = 1 - int(tokens.usable.sum()) / max(num_tokens, 1)
    if num_tokens and share > MOSTLY_DROPPED:
        found = [f"{FAULTS[name]} ({int(count)} tokens)" for name, count in tokens.faults.items() if int(count)]
        raise RecordError(
            f"{region.kind} must keep most tokens in the loss, got {share:.0%} that it would drop: {'; '.join(found)}."
        )

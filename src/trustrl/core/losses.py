"""Per-token terms of the loss, exactly 0 on masked and unusable tokens, and their reduction to one number.

Every denominator counts the tokens or sequences of the whole step, including masked and dropped ones. The sum over
ranks and micro-batches therefore equals the result of one device on the whole batch.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config.terms import (
    EntropyBonus,
    KLPenalty,
    Penalty,
    Reduction,
    SequenceMeanTokenMean,
    TokenWeights,
    denominator,
)
from trustrl.core.clean import CleanTokens
from trustrl.core.decision import Decision
from trustrl.core.divergences import k1, k2, k3
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.core.sequences import sequence_length
from trustrl.errors import MissingDataError, RecordError
from trustrl.kernels.logprob_outputs import wide_dtype


class Terms(NamedTuple):
    """One term per token, and the tokens dropped because their term was not finite."""

    value: Float[Tensor, " n"]
    overflow: Bool[Tensor, " n"]


def policy_terms(decision: Decision, tokens: CleanTokens) -> Terms:
    r"""Returns the region's loss per token.

        ℓ_t = −sg(M_t w_t A_t) · log π̃(a_t) + penalty_t

    The coefficient is detached, so ∂ℓ_t/∂log π̃ = −M w A exactly. If the region maximizes an objective, ℓ_t has the
    negative objective as its value and the same gradient.
    """
    dtype, largest = tokens.logp.dtype, tokens.largest_term
    # Blanked at A = 0 too: a weight of inf times an advantage of 0 is NaN, and the gradient is 0 anyway.
    coefficient = torch.where(decision.keep & (tokens.advantage != 0), decision.weight, 0.0) * tokens.advantage
    logp = decision.logp
    if decision.value is None:
        value = coefficient * logp.detach().to(coefficient.dtype)
    else:
        value = torch.where(tokens.advantage != 0, decision.value, 0.0)
    finite = (coefficient.abs() <= largest) & (value.abs() <= largest)  # False on NaN
    if decision.penalty is not None:
        finite = finite & (decision.penalty.detach().abs() <= largest)
    active = tokens.usable & finite
    coefficient = torch.where(active, coefficient, 0.0).to(dtype)
    # Blanked before the product: a projected log-prob of −inf times 0 would be NaN in the backward pass.
    logp = torch.where(active, logp, 0.0)
    if decision.value is None:
        term = -coefficient * logp
    else:
        term = -coefficient * (logp - logp.detach()) - torch.where(active, value, 0.0).to(dtype)
    if decision.penalty is not None:
        term = term + torch.where(active, decision.penalty, 0.0)
    return Terms(term, tokens.usable & ~finite)


def penalty_terms(
    penalty: Penalty, policy: PolicyTokens, rollout: RolloutTokens, tokens: CleanTokens, keep: Bool[Tensor, " n"]
) -> Terms:
    """Returns coefficient × penalty for each usable token. The region's mask applies only with `only_kept`.

    Raises:
        MissingDataError: If the records lack `reference_logp` or `entropy`.
    """
    if isinstance(penalty, EntropyBonus):
        if policy.entropy is None:
            raise MissingDataError("PolicyTokens.entropy must be given for an EntropyBonus, got None.")
        value = -penalty.coefficient * policy.entropy.reshape(-1).to(tokens.logp.dtype)
    else:
        value = penalty.coefficient * _kl_to_reference(penalty, policy, rollout, tokens)
    wanted = tokens.usable & keep if penalty.only_kept else tokens.usable
    finite = value.detach().abs() <= tokens.largest_term
    return Terms(torch.where(wanted & finite, value, 0.0), wanted & ~finite)


def _kl_to_reference(penalty: KLPenalty, policy: PolicyTokens, rollout: RolloutTokens, tokens: CleanTokens) -> Tensor:
    if rollout.reference_logp is None:
        raise MissingDataError("RolloutTokens.reference_logp must be given for a KLPenalty, got None.")
    reference = rollout.reference_logp.detach().reshape(-1).to(wide_dtype(policy.logp))
    log_ratio = reference - tokens.logp
    # NaN, infinities and values that would overflow float32 are blanked before the estimator, whose backward pass would
    # turn the token's 0 into NaN. The NaN put back afterwards counts them.
    representable = log_ratio.detach().abs() <= 80.0
    log_ratio = torch.where(representable, log_ratio, 0.0)
    estimate = {"k1": k1, "k2": k2, "k3": k3}[penalty.estimator](log_ratio)
    if penalty.unbiased:
        moved = tokens.logp - tokens.log_anchor.to(tokens.logp.dtype)
        # The estimate may be 0 where its gradient is not, so the factor itself must be below the largest term.
        representable = representable & (moved.detach() <= math.log(tokens.largest_term))
        estimate = estimate * torch.exp(torch.where(representable, moved, 0.0))
    if penalty.gradient == "score":
        estimate = estimate.detach() * (tokens.logp - tokens.logp.detach() + 1.0)
    return torch.where(representable, estimate, torch.nan)


def reduce_terms(terms: Float[Tensor, " n"], tokens: CleanTokens, reduction: Reduction) -> Float[Tensor, ""]:
    """Returns Σ_t ℓ_t / count, (1/count) Σ_i (1/T_i) Σ_t ℓ_it for the sequence mean of token means, or Σ_t c_t ℓ_t.

    Raises:
        MissingDataError: If packed tokens have no `sequence_ids` and the reduction averages over sequences.
        RecordError: If there is not one weight for each token.
    """
    weights = weights_of(tokens, reduction)
    if weights is not None:
        # A dropped token may have any weight, even NaN, and 0 · NaN must not reach the sum.
        terms = terms * torch.where(tokens.usable, weights, 0.0)
    return finish(terms.sum(dtype=tokens.log_ratio.dtype), tokens, reduction)


def weights_of(tokens: CleanTokens, reduction: Reduction) -> Float[Tensor, " n"] | None:
    """Returns the factor of each token's term before the division by the count; None if all are 1."""
    if isinstance(reduction, TokenWeights):
        weights = reduction.weights
        if not isinstance(weights, Tensor) or weights.numel() != tokens.usable.numel():
            got = tuple(weights.shape) if isinstance(weights, Tensor) else weights
            raise RecordError(f"token-weights.weights must be a tensor of {tokens.usable.numel()} numbers, got {got}.")
        return weights.detach().reshape(-1)
    if isinstance(reduction, SequenceMeanTokenMean):
        if tokens.sequences is None:
            raise MissingDataError(
                "RolloutTokens.sequence_ids must be given for sequence means of packed tokens, got None."
            )
        length = sequence_length(tokens.in_loss, tokens.sequences, tokens.log_ratio).clamp(min=1.0)
        return length.reciprocal()[tokens.sequences.of_token]
    return None


def finish(total: Float[Tensor, ""], tokens: CleanTokens, reduction: Reduction) -> Float[Tensor, ""]:
    """Divides the sum of weighted terms by the reduction's count."""
    count = denominator(reduction)
    if isinstance(count, Tensor):
        count = count.clamp(min=1)
    return (total / count).to(tokens.logp.dtype)

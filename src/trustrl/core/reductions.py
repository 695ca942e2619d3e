"""Reductions from token terms to one number, with global counts.

Every denominator counts the tokens or sequences of the whole step, including masked and dropped ones. The sum over
ranks and micro-batches therefore equals the result of one device on the whole batch.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.config.terms import Reduction, SequenceMeanTokenMean, TokenWeights, denominator
from trustrl.core.clean import CleanTokens
from trustrl.core.sequences import sequence_length
from trustrl.errors import MissingDataError, RecordError


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

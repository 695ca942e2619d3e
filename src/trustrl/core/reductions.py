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
    if isinstance(reduction, TokenWeights):
        weights = reduction.weights
        if not isinstance(weights, Tensor) or weights.numel() != terms.numel():
            got = tuple(weights.shape) if isinstance(weights, Tensor) else weights
            raise RecordError(f"token-weights.weights must be a tensor of {terms.numel()} numbers, got {got}.")
        # A dropped token may have any weight, even NaN, and 0 · NaN must not reach the sum.
        terms = terms * torch.where(tokens.usable, weights.detach().reshape(-1), 0.0).to(terms.dtype)
    if isinstance(reduction, SequenceMeanTokenMean):
        if tokens.sequences is None:
            raise MissingDataError(
                "RolloutTokens.sequence_ids must be given for sequence means of packed tokens, got None."
            )
        length = sequence_length(tokens.in_loss, tokens.sequences, tokens.log_ratio).clamp(min=1.0)
        terms = terms / length[tokens.sequences.of_token]
    count = denominator(reduction)
    if isinstance(count, Tensor):
        count = count.clamp(min=1)
    return (terms.sum(dtype=tokens.log_ratio.dtype) / count).to(tokens.logp.dtype)

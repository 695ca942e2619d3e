"""From terms per token to one number, against global counts.

Every denominator counts tokens or sequences of the whole step, stopped and dropped ones included, so that the sum of
what ranks and micro-batches compute is what one device would have computed on everything.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.config.terms import Reduction, SequenceMeanTokenMean, TokenWeights, denominator
from trustrl.errors import MissingDataError, RecordError
from trustrl.regions.sequence import sequence_length
from trustrl.tokens import Tokens


def reduce_terms(terms: Float[Tensor, " n"], tokens: Tokens, reduction: Reduction) -> Float[Tensor, ""]:
    """Σ_t ℓ_t / count, or (1/count) Σ_i (1/T_i) Σ_t ℓ_it for the sequence mean of token means, or Σ_t c_t ℓ_t.

    Raises:
        MissingDataError: sequence means of packed tokens without `sequence_ids`.
        RecordError: there is not one weight for each token.
    """
    if isinstance(reduction, TokenWeights):
        weights = reduction.weights
        if not isinstance(weights, Tensor) or weights.numel() != terms.numel():
            got = tuple(weights.shape) if isinstance(weights, Tensor) else weights
            raise RecordError(f"token-weights.weights must be a tensor of {terms.numel()} numbers, got {got}.")
        # A token that is left out may have any weight, even NaN: 0 · NaN must not reach the sum.
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

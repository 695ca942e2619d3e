"""The steps of `policy_loss` as torch operations. They are the definition of every other implementation."""

from torch import Tensor

from trustrl.config.terms import Reduction
from trustrl.core.clean import CleanTokens, clean_tokens as clean
from trustrl.core.decision import Decision, decide
from trustrl.core.diagnostics import collect
from trustrl.core.losses import policy_terms, reduce_terms

__all__ = ["clean", "collect", "decide", "reduced_loss"]


def reduced_loss(decision: Decision, tokens: CleanTokens, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """Returns the terms of all tokens reduced to one number, and the overflow flags."""
    term, overflow = policy_terms(decision, tokens)
    return reduce_terms(term, tokens, reduction), overflow

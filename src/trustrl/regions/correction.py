"""Corrections of the mismatch k = π'/μ between trainer and sampler, as a detached factor on the loss."""

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.config.terms import MIS, TIS, Correction
from trustrl.regions.mask import ratio_weight
from trustrl.regions.sequence import sequence_mean
from trustrl.tokens import Tokens


def correction_factor(tokens: Tokens, correction: Correction) -> Float[Tensor, " n"]:
    """tis: min(k, C).  icepop, mis: k where low ≤ k ≤ high, else 0; mis at its own level."""
    assert tokens.log_mismatch is not None  # both anchors are among the region's needs
    log_k = tokens.log_mismatch
    if isinstance(correction, TIS):
        return ratio_weight(log_k, max_ratio=correction.max_ratio)
    if isinstance(correction, MIS) and correction.level == "sequence":
        assert tokens.sequences is not None
        log_k = sequence_mean(log_k, tokens.counted, tokens.sequences)
    k = torch.exp(log_k)
    return torch.where((k >= correction.min_ratio) & (k <= correction.max_ratio), k, 0.0)

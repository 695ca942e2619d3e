"""Corrections of the mismatch k = π'/μ between trainer and sampler, as a detached factor on the loss."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.config.terms import MIS, TIS, Correction
from trustrl.regions.decision import Decision
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


def corrected(tokens: Tokens, correction: Correction | None, decision: Decision) -> Decision:
    """The decision with a correction multiplied onto its weight, and onto its value, which it scales too."""
    if correction is None:
        return decision
    factor = correction_factor(tokens, correction)
    value = None if decision.value is None else decision.value * factor
    extra = {**decision.extra, "correction": factor, "correction_zero": factor == 0}
    return replace(decision, weight=decision.weight * factor, value=value, extra=extra)

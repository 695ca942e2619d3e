"""Weights of tokens: the capped ratio, and the factor that corrects the mismatch between trainer and sampler."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config.statistics import BinaryTV
from trustrl.config.terms import MIS, TIS, Correction, DivergenceGate, IcePop
from trustrl.core.clean import CleanTokens
from trustrl.core.divergences.sampled import binary_kl, binary_tv
from trustrl.core.sequences import sequence_mean, sequence_total


def ratio_weight(log_ratio: Float[Tensor, "*batch"], *, max_ratio: float | None) -> Float[Tensor, "*batch"]:
    """Returns w = min(r, C). The cap applies before the exponential, so a capped weight never overflows."""
    return torch.exp(log_ratio if max_ratio is None else log_ratio.clamp(max=math.log(max_ratio)))


def capped_weight(
    log_ratio: Float[Tensor, " n"], *, max_ratio: float | None
) -> tuple[Float[Tensor, " n"], dict[str, Tensor]]:
    """Returns w = min(r, C), and with a cap the tokens that it lowered, for metrics."""
    weight = ratio_weight(log_ratio, max_ratio=max_ratio)
    return weight, {} if max_ratio is None else {"capped": log_ratio > math.log(max_ratio)}


def correction_factor(tokens: CleanTokens, correction: Correction) -> Float[Tensor, " n"]:
    """Returns the factor that corrects the mismatch k = π'/μ between trainer and sampler.

    TIS:              min(k, C)
    IcePop and MIS:   k where low ≤ k ≤ high, else 0
    DivergenceGate:   k where D(μ‖π') ≤ δ, else 0

    TIS and MIS may use the product of k over the sequence, MIS also its geometric mean, and the gate the mean of D.
    """
    assert tokens.log_mismatch is not None  # the region's needs include both anchors
    log_k = tokens.log_mismatch
    if isinstance(correction, DivergenceGate):
        return torch.where(_gated(tokens, log_k, correction), 0.0, torch.exp(log_k))
    level = getattr(correction, "level", "token")
    if level == "sequence-mean":
        log_k = sequence_mean(log_k, tokens.counted, tokens.grouped)
    elif level == "sequence-product":
        log_k = sequence_total(log_k, tokens.counted, tokens.grouped)
    return bounded_weight(log_k, correction)


def bounded_weight(log_k: Float[Tensor, "*batch"], term: TIS | IcePop | MIS) -> Float[Tensor, "*batch"]:
    """Returns f(k) of a correction: min(k, C) for TIS, k inside the band and 0 outside for IcePop and MIS."""
    if isinstance(term, TIS):
        return ratio_weight(log_k, max_ratio=term.max_ratio)
    k = torch.exp(log_k)
    return torch.where((k >= term.min_ratio) & (k <= term.max_ratio), k, 0.0)


def _gated(tokens: CleanTokens, log_k: Float[Tensor, " n"], gate: DivergenceGate) -> Bool[Tensor, " n"]:
    """Flags tokens whose π', or whose sequence's π' on average, is further from μ than the bound."""
    log_proximal = tokens.log_anchor  # a correction requires the anchor π'
    log_behavior = (log_proximal - log_k).clamp(max=0.0)
    if isinstance(gate.divergence, BinaryTV):
        distance = binary_tv(log_proximal, log_behavior).lower
    else:
        distance = binary_kl(log_proximal, log_behavior, resolution=tokens.resolution).lower
    if gate.level == "sequence":
        distance = sequence_mean(distance, tokens.counted, tokens.grouped)
    return distance > gate.divergence.bounds[0]

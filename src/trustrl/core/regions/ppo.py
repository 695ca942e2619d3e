r"""PPO and its relatives on the ratio: clip, dual clip, MiniRL, CISPO and the plain policy gradient.

PPO's clip has exactly the gradient of a mask on |r − 1|:

    ∂/∂log π of min(r·A, clip(r, 1 − ε⁻, 1 + ε⁺)·A)  =  M·r·A,   M = 0 iff the token is `leaving` by |r − 1|

so PPO shares its mask with DPPO and differs in the statistic alone.

Reference: Proximal Policy Optimization Algorithms, arXiv:1707.06347, eq. 7.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config.regions import CISPO, PPO, MiniRL, PolicyGradient
from trustrl.config.statistics import Ratio
from trustrl.core.clean import CleanTokens
from trustrl.core.divergences.measure import measure
from trustrl.core.regions.decision import Decision, corrected, weighted
from trustrl.core.regions.dppo import mask_by, mask_tokens, tightened


def clipped_objective(
    log_ratio: Float[Tensor, " n"],
    advantage: Float[Tensor, " n"],
    *,
    max_increase: float | Tensor,
    max_decrease: float | Tensor,
) -> Float[Tensor, " n"]:
    """Returns PPO's textbook value, min(r·A, clip(r, 1 − max_decrease, 1 + max_increase)·A)."""
    ratio = torch.exp(log_ratio)
    bounds: tuple[Any, Any] = 1 - max_decrease, 1 + max_increase  # torch types them as two numbers or two tensors
    return torch.minimum(ratio * advantage, ratio.clamp(*bounds) * advantage)


def runaway(log_ratio: Float[Tensor, " n"], advantage: Float[Tensor, " n"], *, max_ratio: float) -> Bool[Tensor, " n"]:
    """Flags tokens that dual clip masks: A < 0 and r > c.

    Reference: Mastering Complex Control in MOBA Games, arXiv:1912.09729, eq. 5.
    """
    return (advantage < 0) & (torch.exp(log_ratio) > max_ratio)


def decide_ppo(tokens: CleanTokens, region: PPO) -> Decision:
    """Masks tokens whose ratio leaves the clip range, with dual clip if `dual_clip` is set."""
    decision = clip_tokens(tokens, region.ratio, max_ratio=region.max_ratio, textbook_value=region.action == "clip")
    if region.relax_below is not None:
        decision = _relaxed(tokens, decision, region.relax_below)
    if region.dual_clip is not None:
        masked = runaway(tokens.log_ratio, tokens.advantage, max_ratio=region.dual_clip)
        value = decision.value
        if value is not None:
            value = torch.where(masked, region.dual_clip * tokens.advantage, value)
        decision = replace(decision, keep=decision.keep & ~masked, value=value)
    return corrected(tokens, region.correction, decision)


def _relaxed(tokens: CleanTokens, decision: Decision, below: float) -> Decision:
    """Keeps tokens whose anchor probability is below a bound, as if their clip range were infinite."""
    relaxed = torch.exp(tokens.log_anchor) < below
    value = decision.value
    if value is not None:
        value = torch.where(relaxed, torch.exp(tokens.log_ratio) * tokens.advantage, value)
    return replace(decision, keep=decision.keep | relaxed, value=value)


def clip_tokens(
    tokens: CleanTokens, ratio: Ratio, *, max_ratio: float | None = None, textbook_value: bool = False
) -> Decision:
    """Returns PPO's mask on |r − 1|, with the textbook objective as its value if requested."""
    decision = mask_tokens(tokens, ratio, max_ratio=max_ratio)
    if not textbook_value:
        return decision
    max_decrease, max_increase = ratio.bounds
    bounds = tightened({"max_increase": max_increase, "max_decrease": max_decrease}, tokens)
    value = clipped_objective(tokens.log_ratio, tokens.advantage, **bounds)
    return replace(decision, value=value)


def decide_minirl(tokens: CleanTokens, region: MiniRL) -> Decision:
    """Masks by the trainer's own drift π/π' and weights by π/μ.

    Reference: Stabilizing Reinforcement Learning with LLMs, arXiv:2512.01374.
    """
    assert tokens.log_mismatch is not None  # the region's needs include both anchors
    log_weight = tokens.log_ratio + tokens.log_mismatch
    interval = measure(tokens, region.ratio)
    return mask_by(tokens, interval, region.ratio, direction="away", max_ratio=region.max_ratio, log_weight=log_weight)


def truncate(tokens: CleanTokens, *, max_ratio: float | None) -> Decision:
    """Returns the decision that masks nothing and weights every token by min(r, C)."""
    return weighted(tokens, torch.zeros_like(tokens.usable), tokens.log_ratio, max_ratio)


def decide_cispo(tokens: CleanTokens, region: CISPO) -> Decision:
    """Caps every weight at C and masks nothing.

    Reference: MiniMax-M1, arXiv:2506.13585.
    """
    return corrected(tokens, region.correction, truncate(tokens, max_ratio=region.max_ratio))


def decide_policy_gradient(tokens: CleanTokens, region: PolicyGradient) -> Decision:
    """Weights every token by its ratio and masks nothing: the unconstrained baseline."""
    return corrected(tokens, region.correction, truncate(tokens, max_ratio=None))

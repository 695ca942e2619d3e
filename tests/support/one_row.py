"""One sequence whose probabilities are written out, for truth tables by hand."""

import torch

import trustrl
from support.worlds import log


def row(region, policy, behavior, advantage, proximal=None):
    """Gradient per token by log π of one sequence, times −1/A where A is not 0, with the reduction's factor removed."""
    logp = torch.tensor([[log(p) for p in policy]], dtype=torch.float64, requires_grad=True)
    others = {"behavior_logp": behavior, "proximal_logp": proximal}
    rollout = trustrl.RolloutTokens(
        **{name: torch.tensor([[log(p) for p in x]], dtype=torch.float64) for name, x in others.items() if x},
        advantage=torch.tensor([advantage], dtype=torch.float64),
        in_loss=torch.ones(1, len(policy), dtype=torch.bool),
    )
    by_sequence = region.needs().reduction is not None
    reduction = trustrl.SequenceMeanTokenMean(num_sequences=1) if by_sequence else trustrl.TokenSum()
    out = trustrl.policy_loss(trustrl.PolicyTokens(logp=logp), rollout, region, reduction=reduction)
    out.loss.backward()
    factors = -logp.grad[0] * (len(policy) if by_sequence else 1) / (advantage or 1.0)
    return factors.tolist(), out

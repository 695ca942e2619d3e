"""A mini-batch as SkyRL's trainer has it, and what a registered loss makes of it."""

from typing import Any, NamedTuple

import torch
from skyrl.backends.skyrl_train.utils import ppo_utils
from torch import Tensor

from trustrl.engines import skyrl as engine

REDUCTIONS = ("token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
ROWS, LENGTH, MICRO, PROMPT, LONGEST = 16, 24, 4, 4, 40

if "trustrl" not in ppo_utils.PolicyLossRegistry.list_available():  # once a process, whichever test file came first
    engine.register()


class Batch(NamedTuple):
    """Three log-probs of the sampled tokens, their advantages, and which of them count."""

    log_probs: Tensor
    old_log_probs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor


def batch(seed: int = 0, *, drift: float = 0.5, mismatch: float = 0.2) -> Batch:
    """Sequences of all lengths, one empty and one of a single token; tokens from rare to near certain; one group of
    sequences without advantage; values outside the loss that no log-prob has."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    old = -torch.exp(1.5 * normal(ROWS, LENGTH))
    new = (old + drift * normal(ROWS, LENGTH)).clamp(max=-1e-4)
    rollout = (old + mismatch * normal(ROWS, LENGTH)).clamp(max=-1e-4)
    lengths = torch.randint(2, LENGTH + 1, (ROWS,), generator=make)
    lengths[0], lengths[1] = 0, 1
    mask = torch.arange(LENGTH) < lengths.unsqueeze(1)
    mask[2, 1] = False  # a tool's answer in the middle
    for x, value in ((new, torch.nan), (old, torch.inf), (rollout, -torch.inf)):
        x[~mask] = value
    advantages = normal(ROWS, 1).expand(ROWS, LENGTH).clone()
    advantages[8:10] = 0.0
    return Batch(new, old, rollout, advantages, mask.long())


def scaled(tokens: Batch, reduction: str) -> Batch:
    """As SkyRL's own function divides the advantages of a mini-batch before its workers see them."""
    divided = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        tokens.advantages, tokens.loss_mask, reduction, micro_batch_size=MICRO, max_seq_len=LONGEST,
        prompt_boundaries=[(at, at + PROMPT) for at in range(0, ROWS, PROMPT)],
    )  # fmt: skip
    return tokens._replace(advantages=divided)


def algorithm(policy_loss_type: str, **more: Any) -> engine.RegionAlgorithmConfig:
    return engine.RegionAlgorithmConfig(policy_loss_type=policy_loss_type, **{"metrics": "all"} | more)


class Result(NamedTuple):
    loss: float
    gradient: Tensor
    metrics: dict[str, float]


def result(config: Any, tokens: Batch) -> Result:
    """The loss of this name, found and called as SkyRL's workers do, and its gradient by the policy's log-probs."""
    logp = tokens.log_probs.clone().requires_grad_()
    loss, metrics = ppo_utils.PolicyLossRegistry.get(config.policy_loss_type)(
        logp,
        tokens.old_log_probs,
        tokens.advantages,
        config=config,
        loss_mask=tokens.loss_mask,
        rollout_logprobs=tokens.rollout_logprobs,
    )
    (gradient,) = torch.autograd.grad(loss, logp)
    return Result(loss.item(), gradient, metrics)


def error(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖."""
    return ((found - wanted).norm() / wanted.norm()).item()

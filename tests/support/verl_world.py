"""A micro-batch as verl's policy losses get it, and what a loss makes of it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

from trustrl.engines.verl import RegionLossConfig

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
PER_SEQUENCE = ("seq-mean-token-mean",)
LOCAL: dict[str, Any] = {}
GLOBAL = {"dp_size": 4, "batch_num_tokens": 777, "global_batch_size": 40, "loss_scale_factor": 24}
"""What verl's trainer fills in: counts over all ranks and micro-batches."""


class Batch(NamedTuple):
    """Two log-probs of the sampled tokens, their advantages, and which of them count."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor

    def rows(self, *which: int) -> "Batch":
        return Batch(*(x[list(which)] for x in self))


def batch(*, noise: float = 0.5, seed: int = 0, rows: int = 16, length: int = 24) -> Batch:
    """Sequences of all lengths, one empty and one of a single token; tokens from rare to near certain."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    old = -torch.exp(1.5 * normal(rows, length))
    new = (old + noise * normal(rows, length)).clamp(max=-1e-4)
    lengths = torch.randint(2, length + 1, (rows,), generator=make)
    lengths[0], lengths[1] = 0, 1
    mask = torch.arange(length) < lengths.unsqueeze(1)
    mask[2, 1] = False  # a tool's answer in the middle
    return Batch(old, new, normal(rows, 1).expand(rows, length).contiguous(), mask)


def actor(loss_mode: str, *, info: dict[str, Any] = LOCAL, policy_loss: Any = None, **more: Any) -> ActorConfig:
    """verl's settings of the actor; `policy_loss` are its keys beside the name."""
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=4, global_batch_info=dict(info),
        policy_loss=RegionLossConfig(loss_mode=loss_mode, **{"metrics": "all"} | (policy_loss or {})), **more,
    )  # fmt: skip


class Result(NamedTuple):
    loss: float
    gradient: Tensor
    metrics: dict[str, float]


def result(config: ActorConfig, tokens: Batch, *, mode: str = "token-mean", is_weights: Tensor | None = None) -> Result:
    """The named loss, found and called as verl does, and its gradient by the policy's log-probs."""
    logp = tokens.log_prob.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=tokens.old_log_prob,
        log_prob=logp,
        advantages=tokens.advantages,
        response_mask=tokens.response_mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=is_weights,
    )
    (gradient,) = torch.autograd.grad(loss, logp)
    return Result(loss.item(), gradient, metrics)


def error(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖."""
    return ((found - wanted).norm() / wanted.norm()).item()

"""Micro-batches with everything a record may hold, and what the loss decided about them."""

import math
from typing import Any, NamedTuple

import torch

import trustrl
from trustrl import PolicyTokens, RolloutTokens, TopK
from trustrl.core.policy_loss import LossOutput, policy_loss
from trustrl.recording import SequenceRows

REGION = trustrl.preset("dppo-binary-tv")


class Batch(NamedTuple):
    out: LossOutput
    policy: PolicyTokens
    rollout: RolloutTokens
    sequences: Any


def batch(
    *, seed=0, rows=8, length=16, first=0, moved=0.3, region=REGION, k=0, proximal=False, entropy=True, at=None
) -> Batch:
    """Sequences `first`, `first` + 1, … of all lengths; `at` replaces single policy log-probs."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    behavior = -torch.exp(normal(rows, length)) - 0.05
    logp = (behavior + moved * normal(rows, length)).clamp(max=-1e-3)
    for place, value in (at or {}).items():
        logp[place] = value
    in_loss = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=draw)
    in_loss[0, 1] = False
    topk = None
    if k:
        ids = torch.stack([torch.randperm(97, generator=draw)[:k] for _ in range(rows * length)]).view(rows, length, k)
        # The ids share 0.9 of what the sampled token leaves on either side.
        left = torch.log1p(-torch.maximum(behavior, logp.detach()).clamp(max=-1e-3).exp()) + math.log(0.9)
        at_ids = torch.log_softmax(normal(rows, length, k), -1) + left.unsqueeze(-1)
        topk = TopK(ids, at_ids, tail_logp=torch.log1p(-behavior.exp() - at_ids.exp().sum(-1)))
    rollout = RolloutTokens(
        advantage=normal(rows),
        in_loss=in_loss,
        behavior_logp=behavior,
        proximal_logp=behavior - 0.01 if proximal else None,
        token_ids=torch.randint(100, 200, (rows, length), generator=draw),
        topk=topk,
        version=torch.full((rows, length), 3),
        turn=torch.arange(length).expand(rows, length) // 4,
    )
    policy = PolicyTokens(
        logp=logp.requires_grad_(),
        entropy=normal(rows, length).abs() if entropy is True else entropy,
        topk_logp=None if topk is None else topk.logp - 0.01,
    )
    out = policy_loss(policy, rollout, region, reduction=trustrl.TokenSum())
    return Batch(out, policy, rollout, torch.arange(first, first + rows))


def give(recorder, *batches, step=0, update=0):
    """A step of these micro-batches."""
    for b in batches:
        recorder.add(b.out, b.policy, b.rollout, sequences=b.sequences, step=step, update=update)
    return recorder.end_step(step, trustrl.merge([b.out.sums for b in batches]))


def sequence_rows(ids=(5, 6, 7), **more) -> SequenceRows:
    """Completions of one prompt, with every field known."""
    ids = list(ids)
    usual = {
        "group": [11] * len(ids), "task_id": ["sums"] * len(ids), "prompt_tokens": [4] * len(ids),
        "completion_tokens": list(range(1, len(ids) + 1)), "reward": [float(at) for at in range(len(ids))],
        "rewards": [{"correct": 0.5, "format": float(at)} for at in range(len(ids))],
        "advantage": [-1.0] * len(ids), "stop_reason": ["length"] * len(ids), "replica": [str(at % 2) for at in ids],
        "prompt": [f"2 + {at}" for at in ids], "completion": [f"= {at + 2}" for at in ids],
    }  # fmt: skip
    return SequenceRows(sequence=ids, **usual | more)

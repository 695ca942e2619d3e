"""Small random batches with every field a region could ask for, and the same batch for the oracle."""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

import trustrl
from support.oracle import Case
from trustrl import regions
from trustrl.core.clean import CleanTokens, clean_tokens

K = 20


@dataclass
class World:
    """Two full policies, a mismatched third, and tokens drawn from the first."""

    behavior: torch.Tensor  # (B, T, V) log-probs, float64
    proximal: torch.Tensor
    policy: torch.Tensor
    tokens: torch.Tensor
    advantage: torch.Tensor
    in_loss: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return max(int(self.in_loss.sum()), 1)

    def at_token(self, logp):
        return logp.gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)

    def tail(self, logp, ids):
        """log of the mass outside the ids and the sampled token."""
        known = (
            torch.zeros_like(logp, dtype=torch.bool).scatter(-1, ids, True).scatter(-1, self.tokens.unsqueeze(-1), True)
        )
        return torch.logsumexp(logp.masked_fill(known, -torch.inf), -1)

    def anchor(self, name):
        return self.behavior if name == "behavior" else self.proximal

    def case(self, k=K):
        """The same batch for the oracle."""
        return Case(
            self.at_token(self.behavior).numpy(),
            self.at_token(self.policy).numpy(),
            self.advantage.expand(self.tokens.shape).numpy() if self.advantage.ndim == 2 else np.repeat(self.advantage.numpy()[:, None], self.tokens.shape[1], 1),
            self.in_loss.numpy(),
            self.at_token(self.proximal).numpy(),
            self.behavior.exp().numpy(),
            self.policy.exp().numpy(),
            self.tokens.numpy(),
            k,
        )  # fmt: skip

    def rollout(self, anchor="behavior", *, dtype=torch.float64, k=K, with_tails=False, **changes):
        source = self.anchor(anchor)
        ids = source.topk(min(k, source.shape[-1]), dim=-1).indices
        tail = self.tail(source, ids).to(dtype) if with_tails else None
        record = trustrl.RolloutTokens(
            behavior_logp=self.at_token(self.behavior).to(dtype),
            proximal_logp=self.at_token(self.proximal).to(dtype),
            advantage=self.advantage.to(dtype),
            in_loss=self.in_loss,
            token_ids=self.tokens,
            topk=trustrl.TopK(ids, source.gather(-1, ids).to(dtype), anchor, tail),
            full=trustrl.FullVocabulary(source.to(dtype), anchor),
        )
        return replace(record, **changes) if changes else record

    def policy_tokens(self, rollout, *, dtype=torch.float64, grad=True):
        """The policy's side as leaves: gradients arrive at each log-prob."""
        ids = rollout.topk.ids

        def leaf(x):
            return x.to(dtype).detach().clone().requires_grad_(grad)

        with_tails = rollout.topk.tail_logp is not None
        return trustrl.PolicyTokens(
            tail_logp=leaf(self.tail(self.policy, ids)) if with_tails else None,
            logp=leaf(self.at_token(self.policy)),
            topk_logp=leaf(self.policy.gather(-1, ids)),
            full_logp=leaf(self.policy),
            entropy=-(self.policy.exp() * self.policy).sum(-1).to(dtype),
        )


def world(seed=0, *, rows=4, width=16, vocabulary=48, peak=2.0, drift=0.5, mismatch=0.1) -> World:
    """`drift` moves π from μ, `mismatch` moves π' from μ; some advantages are 0, some tokens outside the loss."""
    g = torch.Generator().manual_seed(seed)

    def noise():
        return torch.randn(rows, width, vocabulary, generator=g, dtype=torch.float64)

    behavior = torch.log_softmax(peak * noise(), -1)
    proximal = torch.log_softmax(behavior + mismatch * noise(), -1)
    policy = torch.log_softmax(behavior + drift * noise(), -1)
    flat = behavior.exp().reshape(-1, vocabulary)
    tokens = (
        torch.multinomial(flat, 1, generator=g).reshape(rows, width)
        if flat.numel()
        else torch.zeros(rows, width, dtype=torch.long)
    )
    advantage = torch.randn(rows, width, generator=g, dtype=torch.float64)
    advantage[torch.rand(rows, width, generator=g) < 0.1] = 0.0
    in_loss = torch.rand(rows, width, generator=g) < 0.8
    return World(behavior, proximal, policy, tokens, advantage, in_loss)


def reduction_for(name_or_region, w):
    """Token sum, except for regions that are defined with one reduction only."""
    region = trustrl.preset(name_or_region) if isinstance(name_or_region, str) else name_or_region
    if region.needs().reduction is not None:
        return trustrl.SequenceMeanTokenMean(num_sequences=w.tokens.shape[0])
    return trustrl.TokenSum()


def run(name_or_region, w, *, dtype=torch.float64, reduction=None, **changes):
    """(output, policy record) of one forward and backward pass."""
    region = trustrl.preset(name_or_region) if isinstance(name_or_region, str) else name_or_region
    needs = region.needs()
    k = needs.topk or K
    if needs.topk > w.behavior.shape[-1]:
        k = w.behavior.shape[-1]
        region = replace(region, k=k)
    rollout = w.rollout(needs.anchor, dtype=dtype, k=k, **changes)
    policy = w.policy_tokens(rollout, dtype=dtype)
    out = trustrl.policy_loss(policy, rollout, region, reduction=reduction or reduction_for(region, w))
    out.loss.backward()
    return out, policy


def narrow_preset(name, most=64):
    """The preset with at most this many columns, so that a small vocabulary has a tail."""
    region = trustrl.preset(name)
    return replace(region, k=most) if region.needs().topk > most else region


def grad_of(x):
    return torch.zeros_like(x) if x.grad is None else x.grad


def log(p: float) -> float:
    return math.log(p) if p > 0 else -math.inf


def mapped(record, change):
    """The record with every tensor in it changed alike, nested records included."""
    new = {}
    for f in fields(record):
        if not f.init:
            continue
        x = getattr(record, f.name)
        if isinstance(x, torch.Tensor):
            x = change(x)
        elif isinstance(x, (trustrl.TopK, trustrl.FullVocabulary)):
            x = mapped(x, change)
        new[f.name] = x
    return type(record)(**new)


def gradient(policy):
    own = [] if policy.topk is None else [policy.topk.logp]
    leaves = [policy.logp, policy.topk_logp, policy.full_logp, *own]
    found = [x.grad.clone() for x in leaves if x.grad is not None]
    for x in leaves:
        x.grad = None
    return found


def tokens_of_sequences(*sequence_ids: int) -> CleanTokens:
    """Clean tokens of these sequences, all in the loss."""
    logp = torch.full((len(sequence_ids),), -1.0, dtype=torch.float64)
    rollout = trustrl.RolloutTokens(
        behavior_logp=logp,
        advantage=torch.ones_like(logp),
        in_loss=torch.ones_like(logp, dtype=torch.bool),
        sequence_ids=torch.tensor(sequence_ids),
    )
    needs = regions.Needs(anchors=frozenset({"behavior"}), anchor="behavior", sequences=True)
    return clean_tokens(trustrl.PolicyTokens(logp=logp), rollout, needs)

"""Pairs of policies that TROLL projects, from small steps to swapped certainties, and its loss on a top-K."""

from functools import cache

import torch

import trustrl
from trustrl.core.projection import kl_along, path

EPS = 0.05


def normal(x):
    return torch.log_softmax(x, -1)


def randoms(n, c, scale, seed, peak=2.0):
    g = torch.Generator().manual_seed(seed)
    b = normal(peak * torch.randn(n, c, generator=g, dtype=torch.float64))
    return normal(b + scale * torch.randn(n, c, generator=g, dtype=torch.float64)), b


def one_hot(n, c, gap, at, seed):
    g = torch.Generator().manual_seed(seed)
    x = -gap + torch.rand(n, c, generator=g, dtype=torch.float64)
    x[:, at] = 0.0
    return normal(x)


def near_edge(n, c, seed):
    """Tokens whose KL lies within 1e-9 to 1e-2 of the bound, on either side."""
    p, b = randoms(n, c, 1.0, seed)
    log_b, d = path(p, b)
    beta = torch.full((n,), 0.5, dtype=torch.float64)
    for _ in range(80):
        kl, _, var = kl_along(log_b, d, beta)
        beta = (beta - (kl - EPS) / (beta * var)).clamp(1e-3, 0.999)
    g = torch.Generator().manual_seed(seed)
    nudge = 10 ** (-9 + 7 * torch.rand(n, generator=g, dtype=torch.float64)) * torch.sign(
        torch.rand(n, generator=g) - 0.5
    )
    return normal(b + ((beta + nudge).unsqueeze(-1)) * d), b


CORPUS = {
    "random, small steps": lambda: randoms(20_000, 22, 0.3, 0),
    "random, large steps": lambda: randoms(20_000, 22, 2.0, 1),
    "random, wild steps": lambda: randoms(15_000, 22, 8.0, 2),
    "random, two cells": lambda: randoms(10_000, 2, 1.0, 3),
    "random, many cells": lambda: randoms(3_000, 258, 1.0, 4),
    "peaked": lambda: randoms(10_000, 22, 3.0, 5, peak=10.0),
    "one-hot swap, 10 nats": lambda: (one_hot(4_000, 22, 10.0, 1, 6), one_hot(4_000, 22, 10.0, 0, 7)),
    "one-hot swap, 100 nats": lambda: (one_hot(4_000, 22, 100.0, 1, 8), one_hot(4_000, 22, 100.0, 0, 9)),
    "one-hot swap, 700 nats": lambda: (one_hot(2_000, 22, 700.0, 1, 10), one_hot(2_000, 22, 700.0, 0, 11)),
    "one-hot to uniform": lambda: (normal(torch.zeros(2_000, 22, dtype=torch.float64)), one_hot(2_000, 22, 100.0, 0, 12)),
    "uniform to one-hot": lambda: (one_hot(2_000, 22, 100.0, 0, 13), normal(torch.zeros(2_000, 22, dtype=torch.float64))),
    "all mass into the tail": lambda: (one_hot(4_000, 22, 30.0, 21, 14), randoms(4_000, 22, 0.0, 15)[1]),
    "all mass out of the tail": lambda: (randoms(4_000, 22, 0.0, 16)[0], one_hot(4_000, 22, 30.0, 21, 17)),
    "at the edge": lambda: near_edge(8_000, 22, 18),
    "not moved": lambda: (randoms(2_000, 22, 0.0, 19)[0],) * 2,
}  # fmt: skip
CORPUS = {name: cache(make) for name, make in CORPUS.items()}


def sparse_loss(region, w, logits, k, tail="lse"):
    """The same loss on the anchor's top k, with the rest in one bucket."""
    anchor = w.anchor(region.anchor)
    ids = anchor.topk(k, -1).indices
    logp = normal(logits)
    known = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, ids, True).scatter(-1, w.tokens.unsqueeze(-1), True)

    def rest(x):
        return torch.logsumexp(x.masked_fill(known, -torch.inf), -1)

    policy_tail, anchor_tail = (rest(logp), rest(anchor)) if tail != "derived" else (None, None)
    if tail == "cut":
        policy_tail = policy_tail.detach()
    rollout = trustrl.RolloutTokens(
        behavior_logp=w.at_token(w.behavior), proximal_logp=w.at_token(w.proximal), advantage=w.advantage, in_loss=w.in_loss,
        token_ids=w.tokens, topk=trustrl.TopK(ids, anchor.gather(-1, ids), region.anchor, tail_logp=anchor_tail),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=w.at_token(logp), topk_logp=logp.gather(-1, ids), tail_logp=policy_tail)
    return trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum())

"""A region's reading of the vocabulary in 16 bits, against float64 from the same hidden states and output layer.

The layers below round differently in every engine, so a comparison with another model cannot be strict. From the states
that enter the output layer, everything is known. With u the unit roundoff of the products and L a row's largest
|logit|, a product is off by at most u·L, and so is the log-sum-exp. Hence, with δ = 2 u L,

    a log-prob                        δ
    TV and KL between two policies    2 (exp(δ) − 1) and 2 δ exp(δ) + (exp(δ) − 1)
    a gradient G·W                    E·|W|, element by element, where E bounds the error of G: each of its terms is a
                                      probability (of a tail: a quotient of two), off by a factor of exp(δ), and rounded
                                      with the product and the result (3 u). Terms may cancel, so their sizes add up

The sums inside a product are float32, which adds √D units of float32 to u. The largest share of its limit that any number
reaches is at most 1.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

VALUES = ("log_probs", "gathered_logp", "tail_logp", "entropy")
"""Outputs with a gradient; entropy has none unless it was asked for."""


@dataclass
class Reading:
    """One call of `read_vocabulary` and, after the backward pass, the gradients that went through it."""

    states: Tensor
    weight: Tensor
    """This rank's part of the output layer, whose gradient is read."""

    values: Tensor
    """A copy of it: the weights may move before they are compared."""

    wanted: Any
    rollout_head: Any
    shard: Any
    out: Any


@contextmanager
def watched(module):
    """Collects the readings with gradient that a module's `read_vocabulary` makes."""
    original, readings = module.read_vocabulary, []

    def read_vocabulary(states, head, wanted, *, rollout_head=None, shard=None, **more):
        if not (torch.is_grad_enabled() and states.requires_grad):
            return original(states, head, wanted, rollout_head=rollout_head, shard=shard, **more)
        states, weight = states.view_as(states), head.weight.view_as(head.weight)
        out = original(states, head._replace(weight=weight), wanted, rollout_head=rollout_head, shard=shard, **more)
        for x in (states, weight, *(getattr(out, name) for name in VALUES)):
            if x is not None and x.requires_grad:
                x.retain_grad()
        readings.append(Reading(states, weight, weight.detach().clone(), wanted, rollout_head, shard, out))
        return out

    module.read_vocabulary = read_vocabulary
    try:
        yield readings
    finally:
        module.read_vocabulary = original


def over_ranks(readings, *, summed_later):
    """Returns the largest share of its limit that any value or gradient reaches on any rank, by name.

    Every rank must call it.

    Args:
        readings: What `watched` collected on this rank.
        summed_later: Whether the engine itself adds up the states' gradient over tensor-parallel ranks.
    """
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [_shares(reading, summed_later) for reading in readings])
    shares = {}
    for part in parts:
        for name, share in (item for one in part for item in one.items()):
            shares[name] = max(shares.get(name, 0.0), share)
    return shares


def _shares(reading, summed_later):
    wanted = reading.wanted
    live = wanted.ids.reshape(-1).to(reading.states.device) >= 0
    if not live.any():
        return {}
    weight, start = _whole(reading.values, reading.shard)
    states, weight = reading.states.detach().double()[live].requires_grad_(), weight.requires_grad_()
    logits = states @ weight.T / wanted.temperature
    values = _values(logits, wanted, live)
    unit = torch.finfo(reading.states.dtype).eps / 2
    unit += states.shape[-1] ** 0.5 * torch.finfo(torch.float32).eps / 2
    delta = 2 * unit * logits.detach().abs().amax(-1)
    shares, total, error = {}, logits.new_zeros(()), torch.zeros_like(logits)
    for name, value in values.items():
        given = getattr(reading.out, name)
        if given is not None:
            rows = given.detach().reshape(len(live), *given.shape[wanted.ids.ndim :])[live]
            shares[name] = _share(rows, value.detach(), _limit(name, value.detach(), delta))
            if given.grad is not None:
                upstream = given.grad.reshape(len(live), *given.shape[wanted.ids.ndim :])[live].double()
                total = total + torch.where(upstream != 0, upstream * value, 0.0).sum()
                error = error + _slope_error(name, upstream.abs(), logits.detach(), wanted, live, delta, unit)
    shares |= _divergence_shares(reading, logits.detach().log_softmax(-1), delta, live)
    if reading.states.grad is None or not total.requires_grad:
        return shares
    by_states, by_weight = torch.autograd.grad(total, [states, weight])
    moved = error / wanted.temperature
    found = reading.states.grad.detach().double()
    if summed_later and reading.shard is not None:
        dist.all_reduce(found, group=reading.shard.group)
    shares["gradient of the states"] = _share(found[live], by_states, moved @ weight.detach().abs())
    if reading.weight.grad is not None:
        mine = slice(start, start + len(reading.weight))
        limit = moved.T @ states.detach().abs()
        shares["gradient of the output layer"] = _share(reading.weight.grad, by_weight[mine], limit[mine])
    return shares


def _whole(weight, shard):
    """Returns all ranks' parts of an output layer, and where this rank's begins."""
    weight = weight.detach().double()
    if shard is None or dist.get_world_size(shard.group) == 1:
        return weight, 0
    parts = [None] * dist.get_world_size(shard.group)
    dist.all_gather_object(parts, weight.cpu(), group=shard.group)
    return torch.cat(parts).to(weight.device), shard.start


def _values(logits, wanted, live):
    """Returns the outputs of the pass as a direct computation."""
    logp = logits.log_softmax(-1)
    ids = wanted.ids.reshape(-1)[live].unsqueeze(-1)
    values = {"log_probs": logp.gather(-1, ids).squeeze(-1), "entropy": -(logp.exp() * logp).sum(-1)}
    if wanted.gather_ids is not None:
        gathered = wanted.gather_ids.reshape(len(live), -1)[live].long()
        listed = torch.cat([gathered, ids], -1)
        known = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, listed, True)
        values["gathered_logp"] = logp.gather(-1, gathered)
        values["tail_logp"] = logp.masked_fill(known, -torch.inf).logsumexp(-1)
    return values


def _slope_error(name, upstream, logits, wanted, live, delta, unit):
    """Returns a bound on the error of ∂(upstream · value)/∂logits, (N, V). `upstream` is positive."""
    logp, delta = logits.log_softmax(-1), delta.unsqueeze(-1)
    p, ids = logp.exp(), wanted.ids.reshape(-1)[live].unsqueeze(-1)
    if name == "entropy":  # −p (log p + H)
        entropy = -(p * logp).sum(-1, keepdim=True)
        inner = delta + _limit(name, entropy, delta.squeeze(-1))
        return upstream.unsqueeze(-1) * p * ((delta.expm1() + 3 * unit) * (logp.abs() + entropy) + inner)
    if name == "tail_logp":  # p (1[j in the tail] / Σ p − 1)
        share = torch.where(upstream > 0, upstream, 0.0).unsqueeze(-1)
        listed = torch.cat([wanted.gather_ids.reshape(len(live), -1)[live].long(), ids], -1)
        tail = logp.scatter(-1, listed, -torch.inf)
        inside = torch.where(share > 0, (tail - tail.logsumexp(-1, keepdim=True)).exp(), 0.0)
        return share * (((2 * delta).expm1() + 3 * unit) * inside + (delta.expm1() + 3 * unit) * p)
    if name == "log_probs":
        listed, upstream = ids, upstream.unsqueeze(-1)
    else:
        listed = wanted.gather_ids.reshape(len(live), -1)[live].long()
    sizes = torch.zeros_like(p).scatter_add(-1, listed, upstream) + p * upstream.sum(-1, keepdim=True)
    return (delta.expm1() + 3 * unit) * sizes


def _limit(name, value, delta):
    limit = delta.reshape(-1, *[1] * (value.ndim - 1))
    # H = −Σ p log p: the probabilities move by a factor, the log-probs by δ.
    return limit.expm1() * value + limit * limit.exp() if name == "entropy" else limit


def _divergence_shares(reading, logp, delta, live):
    if reading.wanted.anchor_hidden is None:
        return {}
    weight, _ = _whole(reading.rollout_head.weight, reading.shard)
    hidden = reading.wanted.anchor_hidden.reshape(len(live), -1)[live].double()
    anchor = (hidden @ weight.T / reading.wanted.temperature).log_softmax(-1)
    tv, kl = (logp.exp() - anchor.exp()).abs().sum(-1) / 2, (anchor.exp() * (anchor - logp)).sum(-1)
    limits = 2 * delta.expm1(), 2 * delta * delta.exp() + delta.expm1()
    found = (x.reshape(-1)[live] for x in (reading.out.tv, reading.out.kl))
    return dict(zip(("tv", "kl"), map(_share, found, (tv, kl), limits), strict=True))


def _share(found, wanted, limit):
    """Returns the largest |found − wanted| / limit; values that are −inf on both sides are equal."""
    gap = torch.where(found == wanted, 0.0, (found.double() - wanted).abs())
    if gap.isnan().any():
        return float("inf")
    return torch.where(gap == 0, 0.0, gap / limit).max().item()

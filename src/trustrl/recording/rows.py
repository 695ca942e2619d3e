"""Tokens in the loss as host columns: copied from the device without waiting, without graph, without padding."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from trustrl.errors import RecordError
from trustrl.objective import LossOutput
from trustrl.records import PolicyTokens, RolloutTokens
from trustrl.tokens import advantage_per_token


@dataclass(frozen=True, slots=True)
class Rows:
    """Some tokens of one update: a host tensor for each column the file may have, and what they have in common."""

    step: int
    update: int
    rank: int
    columns: Mapping[str, Tensor]
    """(n,) each, (n, K) for the top-K; a column that is not there is null."""

    def __len__(self) -> int:
        return len(self.columns["sequence"])

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return sum(x.nbytes for x in self.columns.values())

    def at(self, index: Int[Tensor, " m"] | slice) -> "Rows":
        """A part of them."""
        return replace(self, columns={name: x[index] for name, x in self.columns.items()})

    def whole_sequences(self, room: int) -> "Rows":
        """As many leading sequences as fit into `room` rows; none is cut, even where packed tokens interleave them."""
        if len(self) <= room:
            return self
        _, sequence, lengths = torch.unique(self.columns["sequence"], return_inverse=True, return_counts=True)
        places = torch.arange(len(self))
        first = torch.full_like(lengths, len(self)).scatter_reduce_(0, sequence, places, "amin")
        order = first.argsort()
        fits = order[lengths[order].cumsum(0) <= room]
        return self.at(torch.isin(sequence, fits).nonzero().squeeze(1))


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A micro-batch on its way to the host. The device may still be writing: `wait` first."""

    shared: tuple[int, int, int]
    """(step, update, rank)."""

    floats: Tensor
    """(F, B, T) or (F, N)."""

    float_names: tuple[str, ...]
    whole: dict[str, Tensor]
    """Everything else, in the batch's shape; `topk_*` have one axis more."""

    in_loss: Bool[Tensor, "*batch"]
    sequences: Int[Tensor, "*batch_or_rows"]
    """One for each row, or for each packed token."""

    copied: "torch.Event | None"

    def rows(self) -> Rows:
        """The tokens in the loss."""
        if self.copied is not None:
            self.copied.synchronize()
        here = self.in_loss.reshape(-1).nonzero().squeeze(1)
        columns = dict(zip(self.float_names, self.floats.flatten(1).index_select(1, here), strict=True))
        for name, x in self.whole.items():
            columns[name] = x.reshape(self.in_loss.numel(), *x.shape[self.in_loss.ndim :]).index_select(0, here)
        if self.in_loss.ndim == 2:
            row = here // self.in_loss.shape[1]
            columns["sequence"] = self.sequences[row]
            columns["position"] = (here - row * self.in_loss.shape[1]).int()
        else:
            columns["sequence"] = self.sequences[here]
            columns["position"] = _place_in_sequence(self.sequences)[here].int()
        return Rows(*self.shared, columns)


@torch.no_grad()
def copied_to_host(
    out: LossOutput,
    policy: PolicyTokens,
    rollout: RolloutTokens,
    sequences: Int[Tensor, "*batch_or_rows"],
    *,
    shared: tuple[int, int, int],
    topk: bool,
) -> HostCopy:
    """Starts copying one micro-batch; nothing of the graph or of the device is kept.

    Args:
        out: what `policy_loss` decided.
        policy: the policy's side.
        rollout: the sampler's side.
        sequences: the name of each row's sequence, or of each token's when packed.
        shared: (step, update, rank).
        topk: whether to take the anchor's top-K along.

    Raises:
        RecordError: there is not one name for each sequence.
    """
    decision, in_loss = out.decision, rollout.in_loss
    if sequences.shape != in_loss.shape[:1]:
        raise RecordError(
            f"sequences must be of shape {tuple(in_loss.shape[:1])}, got {tuple(sequences.shape)}. Each row has one, "
            "and each token when packed."
        )
    interval = decision.divergence or (None, None)
    floats = {
        "advantage": advantage_per_token(rollout), "behavior_logp": rollout.behavior_logp,
        "proximal_logp": rollout.proximal_logp, "policy_logp": policy.logp, "weight": decision.weight,
        "divergence_lower": interval[0], "divergence_upper": interval[1], "entropy": policy.entropy,
    }  # fmt: skip
    floats = {name: x for name, x in floats.items() if x is not None}
    whole = {"kept": decision.keep, "token_id": _int32(rollout.token_ids), "sampler_version": _int32(rollout.version)}
    if topk and rollout.topk is not None:
        whole |= {"topk_ids": _int32(rollout.topk.ids), "topk_logp": rollout.topk.logp.detach().float()}
    stacked = torch.stack([x.detach().to(torch.float32).reshape(in_loss.shape) for x in floats.values()])
    copy = HostCopy(
        shared,
        _host(stacked),
        tuple(floats),
        {name: _host(x) for name, x in whole.items() if x is not None},
        _host(in_loss),
        _host(sequences.detach().to(torch.int64)),
        None,
    )
    if in_loss.device.type == "cpu":
        return copy
    copied = torch.Event(in_loss.device)
    copied.record()
    return replace(copy, copied=copied)


def _int32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().to(torch.int32)


def _host(x: Tensor) -> Tensor:
    """Always a copy: the trainer may write into its own tensors later. Pinned, so that the device need not wait."""
    return x.detach().to("cpu", non_blocking=True, copy=True)


def _place_in_sequence(sequences: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """How many tokens of the same sequence stand before each token."""
    order = torch.argsort(sequences, stable=True)
    counts = torch.unique_consecutive(sequences[order], return_counts=True)[1]
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)) - first)

"""Tokens in the loss as host columns, and the ids of their sequences.

Tokens are copied from the device without a synchronization, without the autograd graph and without padding. A sequence
has the same id, and is sampled or not, on every rank, at every update and in every run.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from trustrl.core.clean import advantage_per_token
from trustrl.core.policy_loss import LossOutput
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.errors import RecordError

_SALT = 0x5EED
_BITS = 53


def sequence_ids(*, step: int, rollout: int, rank: int, count: int) -> Int[Tensor, " count"]:
    """Returns an id ≥ 0 for each sequence of a rollout. Ids are random 63-bit numbers, so collisions are improbable.

    Args:
        step: The step at which the rollout was drawn. A resumed run continues with new ids.
        rollout: The index of the rollout within this step, from 0.
        rank: The rank of the process that trains on the sequences.
        count: The number of ids.
    """
    key = torch.zeros(1, dtype=torch.int64)
    for part in (step, rollout, rank):
        key = _mixed(key + part + 1)
    return _mixed(key + torch.arange(count)) & 0x7FFF_FFFF_FFFF_FFFF


def is_sampled(sequences: Int[Tensor, "*n"], share: float) -> Bool[Tensor, "*n"]:
    """Flags about this share of the sequences, always the same ones. A larger share includes a smaller one.

    Example:
        >>> is_sampled(torch.arange(10_000), 0.01).sum()
        tensor(104)
    """
    return _shifted(_mixed(sequences ^ _SALT), 64 - _BITS) < round(share * 2**_BITS)


def _mixed(x: Tensor) -> Tensor:
    """Applies the finalizer of splitmix64: every bit of x affects every bit of the result."""
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9, signed
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB, signed
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shifts right and fills with zeros. torch's own shift copies the sign bit."""
    return (x >> by) & ((1 << (64 - by)) - 1)


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens of one update: a host tensor for each column present, and the values that all tokens share."""

    step: int
    update: int
    rank: int
    columns: Mapping[str, Tensor]
    """(n,) each, (n, K) for the top-K, kept ids (below 0 for padding) and experts. Absent ones are null in the file."""

    def __len__(self) -> int:
        return len(self.columns["sequence"])

    @property
    def nbytes(self) -> int:
        """Host memory held by the columns."""
        return sum(x.nbytes for x in self.columns.values())

    def at(self, index: Int[Tensor, " m"] | slice) -> "Rows":
        """Returns the rows at these indices."""
        return replace(self, columns={name: x[index] for name, x in self.columns.items()})

    def whole_sequences(self, room: int) -> "Rows":
        """Returns as many leading sequences as fit into `room` rows.

        Never cuts a sequence, even if packed tokens interleave several.
        """
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
    """A micro-batch in transit to the host. The device may still be writing until `rows` waits for it."""

    shared: tuple[int, int, int]
    """(step, update, rank)."""

    floats: Tensor
    """(F, B, T) or (F, N)."""

    float_names: tuple[str, ...]
    whole: dict[str, Tensor]
    """All other columns, in the batch's shape; `topk_*`, `kept_ids` and `experts` have one more axis."""

    in_loss: Bool[Tensor, "*batch"]
    sequences: Int[Tensor, "*batch_or_rows"]
    """One id per row, or per token when packed."""

    copied: "torch.Event | None"

    def rows(self) -> Rows:
        """Waits for the copy and returns the tokens in the loss."""
        if self.copied is not None:
            self.copied.synchronize()
        here = self.in_loss.reshape(-1).nonzero().squeeze(1)
        columns = dict(zip(self.float_names, self.floats.flatten(1).index_select(1, here), strict=True))
        for name, x in self.whole.items():
            columns[name] = x.reshape(self.in_loss.numel(), *x.shape[self.in_loss.ndim :]).index_select(0, here)
        if self.in_loss.ndim == 2:
            row = here // self.in_loss.shape[1]
            columns["sequence"] = self.sequences[row]
            counted = here - row * self.in_loss.shape[1]
        else:
            columns["sequence"] = self.sequences[here]
            counted = _place_in_sequence(self.sequences)[here]
        columns.setdefault("position", counted.int())
        return Rows(*self.shared, columns)


@torch.no_grad()
def copied_to_host(
    out: LossOutput | None,
    policy: PolicyTokens,
    rollout: RolloutTokens,
    sequences: Int[Tensor, "*batch_or_rows"],
    *,
    shared: tuple[int, int, int],
    more: Collection[str] = (),
) -> HostCopy:
    """Starts copying one micro-batch to the host. The copy keeps neither the graph nor device memory alive.

    Args:
        out: The output of `policy_loss`, or None without a region. Its columns are null then.
        policy: The policy's values.
        rollout: The sampler's values.
        sequences: The sequence id of each row, or of each token when packed.
        shared: (step, update, rank).
        more: What to copy in addition: "topk" (the anchor's), "kept_ids" and "experts" (the sampler's).

    Raises:
        RecordError: If the number of ids is wrong.
    """
    in_loss = rollout.in_loss
    if sequences.shape != in_loss.shape[:1]:
        raise RecordError(
            f"sequences must be of shape {tuple(in_loss.shape[:1])}, got {tuple(sequences.shape)}. Pass one id per "
            "row, or one per token when packed."
        )
    floats = {
        "advantage": advantage_per_token(rollout), "behavior_logp": rollout.behavior_logp,
        "proximal_logp": rollout.proximal_logp, "policy_logp": policy.logp, "entropy": policy.entropy,
    }  # fmt: skip
    whole = {"token_id": _int32(rollout.token_ids), "sampler_version": _int32(rollout.version)}
    whole |= {"turn": _int32(rollout.turn), "position": _int32(rollout.position)}
    if out is not None:
        lower, upper = out.decision.divergence or (None, None)
        floats |= {"weight": out.decision.weight, "divergence_lower": lower, "divergence_upper": upper}
        whole["kept"] = out.decision.keep
    if "kept_ids" in more:
        whole["kept_ids"] = _int32(rollout.kept_ids)
    if "topk" in more and rollout.topk is not None:
        whole |= {"topk_ids": _int32(rollout.topk.ids), "topk_logp": rollout.topk.logp.detach().float()}
        floats["topk_tail"] = rollout.topk.tail_logp
    if "experts" in more and rollout.experts is not None:
        whole["experts"] = rollout.experts.detach().to(torch.int16)
    floats = {name: x for name, x in floats.items() if x is not None}
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
    """Copies to the host, always: the trainer may overwrite its tensors. Pinned, so that the device need not wait."""
    return x.detach().to("cpu", non_blocking=True, copy=True)


def _place_in_sequence(sequences: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Counts the tokens of the same sequence that precede each token."""
    order = torch.argsort(sequences, stable=True)
    counts = torch.unique_consecutive(sequences[order], return_counts=True)[1]
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)) - first)

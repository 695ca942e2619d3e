"""The part of the vocabulary that a region reads, from hidden states and an output layer.

N: tokens, D: hidden size, K: ids. With truncated sampling, a forward pass returns log π inside the ids that the sampler
kept: one row of the output layer per id and token, forward and backward. `KeptSet` then finds what a region reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers.utils import ModelOutput

from trustrl.config.axes import Needs
from trustrl.core.records import FullDivergence, TopK
from trustrl.core.sampling import KeptSet
from trustrl.core.token_logprobs import AnchorStates, VocabShard, token_logprobs
from trustrl.engines.common.kept_columns import KeptColumn
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.errors import EngineError
from trustrl.kernels.kept_logprobs import kept_logprobs

Value = TypeVar("Value")


class Opaque(Generic[Value]):
    """A value that mixed precision does not reach on its way through a wrapped forward.

    FSDP casts every floating tensor among a forward's arguments to the dtype of the weights, inside named tuples,
    dataclasses, and containers too. It passes an object of a plain class on as it is.
    """

    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value


class Wanted(NamedTuple):
    """The part of the vocabulary that a region reads, and the tokens where it reads it.

    Per-token tensors are returned in the shape of `ids`.
    """

    ids: Tensor
    """(*batch): the tokens to score; below 0 for rows to skip."""

    states: Callable[[Tensor], Tensor]
    """Maps the last hidden states, (B, L, D), to those that predict `ids`, (*batch, D)."""

    temperature: float = 1.0
    gather_ids: Tensor | None = None
    """(*batch, K): the ids at which to read the policy's log-probs."""

    top_k: int = 0
    entropy_gradient: bool = False
    hidden: bool = False
    """True to return the hidden states, from which exact divergences are measured later."""

    anchor_hidden: Tensor | None = None
    """(*batch, D): the hidden states that were returned at the rollout weights."""

    anchor_logsumexp: Tensor | None = None

    kept_ids: Tensor | None = None
    """(*batch, K): the ids that truncated sampling kept, below 0 for padding, to return log-probs inside them."""

    def at(self, rows: Tensor, states: Callable[[Tensor], Tensor]) -> "Wanted":
        """Returns the request for some of N tokens.

        Args:
            rows: Their indices, or a mask.
            states: Maps the last hidden states to those that predict these tokens.
        """
        per_token = ("ids", "gather_ids", "anchor_hidden", "anchor_logsumexp", "kept_ids")
        chosen = {name: x[rows] for name in per_token if (x := getattr(self, name)) is not None}
        return self._replace(states=states, **chosen)


def at_completions(labels: Tensor, where: TokenPlaces, **more: Any) -> Wanted:
    """Returns the request for some of the last tokens of B sequences. The state before a token predicts it."""
    return Wanted(where.of(labels[:, -where.shape[1] :]), where.states, **more)


@dataclass
class VocabularyOutput(ModelOutput):
    """Per-token tensors. The first two have the names that the trainers' own fused heads use."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    gathered_logp: Tensor | None = None
    tail_logp: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_logp: Tensor | None = None
    topk_tail_logp: Tensor | None = None
    tv: Tensor | None = None
    kl: Tensor | None = None
    hidden: Tensor | None = None
    logsumexp: Tensor | None = None
    kept_ids: Tensor | None = None
    kept_logp: Tensor | None = None


class Head(NamedTuple):
    """An output layer: logits = softcap(scale · (hidden @ weight.T + bias)) / temperature."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def scaled(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states times the layer's scale."""
        return hidden if self.scale == 1.0 else hidden * self.scale

    @property
    def scaled_bias(self) -> Tensor | None:
        """The bias times the layer's scale."""
        return self.bias if self.bias is None or self.scale == 1.0 else self.bias * self.scale

    def copied(self) -> "Head":
        """Returns the layer as it is now. A weight that is not trained is shared."""
        weight = self.weight.detach()
        return self._replace(
            weight=weight.clone() if self.weight.requires_grad else weight,
            bias=None if self.bias is None else self.bias.detach().clone(),
        )

    def to(self, dtype: torch.dtype) -> "Head":
        """Returns the layer in another dtype."""
        return self._replace(weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))


def read_vocabulary(
    states: Tensor,
    head: Head,
    wanted: Wanted,
    *,
    rollout_head: Head | None = None,
    float32: bool = False,
    shard: VocabShard | None = None,
) -> VocabularyOutput:
    """Returns what a region reads of the vocabulary, in the shape of `wanted.ids`.

    Args:
        states: The states that predict the tokens, (*batch, D).
        head: The output layer, or this rank's part of it.
        wanted: The request.
        rollout_head: The output layer of the rollout weights, for exact divergences.
        float32: Whether to compute the output layer's products in float32.
        shard: The part of the vocabulary that the head holds; None if it holds all of it.

    Raises:
        EngineError: If exact divergences are wanted and no head of the rollout weights was kept.
    """
    batch = wanted.ids.shape
    states_ND = states.reshape(-1, states.shape[-1])
    token_ids = wanted.ids.reshape(-1).to(states_ND.device)
    gather = wanted.gather_ids
    out = token_logprobs(
        head.scaled(states_ND),
        head.weight,
        torch.where(token_ids < 0, -1, token_ids),
        gather_ids=None if gather is None else gather.reshape(len(token_ids), gather.shape[-1]).long(),
        top_k=wanted.top_k,
        entropy=True if wanted.entropy_gradient else "detached",
        against=None if wanted.anchor_hidden is None else _anchor_states(states_ND, wanted, rollout_head),
        temperature=wanted.temperature,
        bias=head.scaled_bias,
        softcap=head.softcap,
        product_dtype=torch.float32 if float32 else None,
        shard=shard,
    )
    kept_ids = kept_logp = None
    if wanted.kept_ids is not None:
        kept_ids = wanted.kept_ids.reshape(len(token_ids), wanted.kept_ids.shape[-1])
        kept_logp = kept_logprobs(
            head.scaled(states_ND),
            head.weight,
            kept_ids,
            temperature=wanted.temperature,
            bias=head.scaled_bias,
            softcap=head.softcap,
            shard=shard,
        )
    fields = {
        "log_probs": out.logp,
        "entropy": out.entropy,
        "gathered_logp": out.gathered_logp,
        "tail_logp": out.tail_logp,
        "topk_ids": None if out.topk is None else out.topk.ids,
        "topk_logp": None if out.topk is None else out.topk.logp,
        "topk_tail_logp": None if out.topk is None else out.topk.tail_logp,
        "tv": out.tv,
        "kl": out.kl,
        "hidden": states_ND.detach() if wanted.hidden else None,
        "logsumexp": out.logsumexp.detach() if wanted.hidden else None,
        "kept_ids": kept_ids,
        "kept_logp": kept_logp,
    }
    return VocabularyOutput(**{name: x.reshape(*batch, *x.shape[1:]) for name, x in fields.items() if x is not None})


def _anchor_states(states_ND: Tensor, wanted: Wanted, rollout_head: Head | None) -> AnchorStates:
    if rollout_head is None:
        raise EngineError(
            "Exact divergences need the head of the rollout weights, and none was kept. Call remember_head first."
        )
    assert wanted.anchor_hidden is not None
    hidden = rollout_head.scaled(wanted.anchor_hidden.reshape(-1, states_ND.shape[-1])).to(states_ND.dtype)
    lse = None if wanted.anchor_logsumexp is None else wanted.anchor_logsumexp.reshape(-1)
    return AnchorStates(hidden, rollout_head.weight, rollout_head.scaled_bias, lse)


def read_by_policy(output: VocabularyOutput, needs: Needs) -> dict[str, Any]:
    """Returns the fields of `PolicyTokens` that a region reads of the whole vocabulary in addition to log π."""
    fields: dict[str, Any] = {}
    if needs.topk:
        fields = {"topk_logp": output.gathered_logp, "tail_logp": output.tail_logp}
    if output.topk_ids is not None:
        assert output.topk_logp is not None
        fields["topk"] = TopK(output.topk_ids, output.topk_logp, of=needs.anchor)
    if needs.full:
        fields["full_divergence"] = FullDivergence(tv=output.tv, kl=output.kl, of=needs.anchor)
    return fields


def packed_kept(columns: Sequence[KeptColumn], device: torch.device) -> Tensor:
    """Returns the kept ids of all N tokens of some sequences, (N, K) int32; −1 beyond the ids of a token."""
    counts = np.concatenate([column.counts for column in columns])
    ids = np.full((len(counts), max(counts.max(initial=0), 1)), -1, np.int32)
    ids[np.arange(ids.shape[1]) < counts[:, None]] = np.concatenate([column.ids for column in columns])
    return torch.from_numpy(ids).to(device)


def policy_fields(kept: KeptSet, needs: Needs, anchor_ids: Tensor | None, token_ids: Tensor) -> dict[str, Any]:
    """Returns the fields of `PolicyTokens` that a region reads in addition to log π, inside the kept set.

    Args:
        kept: The policy inside the kept set.
        needs: The region's needs.
        anchor_ids: (*batch, K): the anchor's most probable ids; None if the region reads the sampled token alone.
        token_ids: (*batch): the sampled tokens.
    """
    if anchor_ids is None:
        return {}
    listed = torch.cat([anchor_ids.long(), token_ids.unsqueeze(-1)], dim=-1)
    fields: dict[str, Any] = {"topk_logp": kept.at(anchor_ids), "tail_logp": kept.outside(listed)}
    if needs.fills:
        fields["topk"] = TopK(*kept.top(needs.topk), of=needs.anchor)
    return fields


def sampled_logp(kept: KeptSet, token_ids: Tensor) -> Tensor:
    """Returns the sampled tokens' log-probs inside the kept set; 0 without gradient where it is unknown.

    Tokens in the loss always have one. A sampled token outside its kept set stays −inf, which is a fault.
    """
    logp = kept.at(token_ids.unsqueeze(-1)).squeeze(-1)
    return torch.where(kept.known, logp, 0.0)


def anchor_fields(kept: KeptSet, needs: Needs, token_ids: Tensor) -> dict[str, Tensor]:
    """Returns π' inside the kept set: `logp` and, if the region reads one, its top-K and the mass outside it."""
    fields = {"logp": sampled_logp(kept, token_ids)}
    if needs.topk:
        ids, top_logp = kept.top(needs.topk)
        fields |= {"topk_ids": ids.int(), "topk_logp": top_logp}
        fields["topk_tail_logp"] = kept.outside(torch.cat([ids, token_ids.unsqueeze(-1)], dim=-1))
    return fields

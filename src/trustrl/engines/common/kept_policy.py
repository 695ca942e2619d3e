"""The policy inside the ids that truncated sampling kept.

A forward pass returns log π inside the kept ids of its micro-batch: one row of the output layer per id and token,
forward and backward. `KeptSet` then finds everything that a region reads.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trustrl.config.axes import Needs
from trustrl.core.records import TopK
from trustrl.core.sampling import KeptSet
from trustrl.engines.common.kept_columns import KeptColumn


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

"""The sampler's record of each sequence, on its way from vLLM's Ray actor to the update.

The actor puts one `SampledRow` per sequence into the response's `mm_train_inputs`, which OpenRLHF carries to the update
as it is; see `anchor_rows`. Loads without OpenRLHF and vLLM: all of its processes handle these objects.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trustrl.config.axes import Region, reads_ages
from trustrl.engines.common.kept_columns import KeptColumn, check_limit, require_kept
from trustrl.engines.common.sampled_record import UNKNOWN, SampledRecord
from trustrl.engines.openrlhf.anchor_rows import rows_under
from trustrl.errors import EngineError, MissingDataError

SAMPLED = "trustrl_sampled"
"""The key of a `SampledRow` in a sequence's dictionary."""

KEPT = "trustrl_kept"
"""The key of its kept ids alone, which the pass over a rollout needs."""


class SampledRow(NamedTuple):
    """μ at the n tokens of one sequence, or of several joined, that requests sampled."""

    topk_ids: np.ndarray
    """(n, K) int32; K is 0 if the region does not read them."""

    topk_logp: np.ndarray
    version: np.ndarray
    """(n,) int32: the number of weight updates before each token; −1 if vLLM does not tell."""

    kept: KeptColumn | None
    """The ids that truncation kept; None if the requests did not truncate."""


def topk_of_sampler(region: Region) -> int:
    """Returns the number of the sampler's most probable ids that a region reads."""
    needs = region.needs()
    return needs.topk if needs.anchor == "behavior" else 0


def is_recorded(region: Region, *, truncated: bool) -> bool:
    """Returns whether a region reads more of the sampler than log μ."""
    return truncated or topk_of_sampler(region) > 0 or reads_ages(region)


def row_of(records: Sequence[SampledRecord], response: Mapping[str, Any], *, top_k: int, max_kept: int) -> SampledRow:
    """Returns the row of one of OpenRLHF's responses.

    Args:
        records: The records of its requests, in order.
        response: What the agent returned.
        top_k: K.
        max_kept: The largest number of ids that truncation may keep.

    Raises:
        EngineError: If the agent did not return the sampled tokens, if some requests truncated and others did not, or
            if a token has more kept ids than are recorded.
    """
    tokens = response["observation_tokens"]
    ranges = [list(tokens[start:end]) for start, end in response["action_ranges"]]
    if [record.tokens.tolist() for record in records] != ranges:
        raise EngineError(
            f"The agent must return the tokens of each of its {len(records)} requests as one of its action_ranges, got "
            f"{len(ranges)} ranges or other tokens. Keep the sampled ids, and do not tokenize the text again."
        )
    columns = [record.kept for record in records if record.kept is not None]
    if columns and len(columns) < len(records):
        raise EngineError(
            f"All requests of a sequence must truncate their sampling, or none, got {len(columns)} of {len(records)} "
            "that do. Leave top_p, top_k and min_p as OpenRLHF passes them to the agent."
        )
    kept = joined_columns(columns) if columns else None
    if kept is not None:
        check_limit(kept, max_kept)
    ids, logp, versions = np.empty((0, top_k), np.int32), np.empty((0, top_k), np.float32), np.empty(0, np.int32)
    return SampledRow(
        np.concatenate([ids, *(record.topk_ids for record in records)]),
        np.concatenate([logp, *(record.topk_logp for record in records)]),
        np.concatenate([versions, *(_versions(record) for record in records)]),
        kept,
    )


def _versions(record: SampledRecord) -> np.ndarray:
    return np.full(len(record), UNKNOWN, np.int32) if record.version is None else record.version


def joined_columns(columns: Sequence[KeptColumn]) -> KeptColumn:
    """Returns several columns as one."""
    return KeptColumn(*(np.concatenate(part) for part in zip(*columns, strict=True)))


def sampled_rows(experience: Any) -> list[SampledRow | None]:
    """Returns the row of each sequence of an `Experience`; None for those without one."""
    return rows_under(experience, SAMPLED)


def require_rows(rows: Sequence[SampledRow | None], mask: Tensor, *, truncated: bool) -> list[SampledRow]:
    """Returns the rows of the sequences of a batch.

    Args:
        rows: A row per sequence.
        mask: (B, T), True on tokens in the loss, which are the sampled ones.
        truncated: Whether the run's settings truncate.

    Raises:
        MissingDataError: If a sequence has no row, one of another length, or kept ids at some tokens only.
        EngineError: If an agent truncates, and the run's settings do not.
    """
    lengths = mask.sum(1).tolist()
    known = [row for row in rows if row is not None]
    held = [None if row is None else len(row.version) for row in rows]
    if held != lengths:
        raise MissingDataError(
            f"experience.mm_train_inputs must carry the sampler's record at {lengths} tokens, got {held}. Start the "
            "run with `python -m trustrl.engines.openrlhf`, and leave action_mask as OpenRLHF makes it."
        )
    columns = [row.kept for row in known if row.kept is not None]
    if truncated:
        empty = KeptColumn(np.empty(0, np.int32), np.empty(0, np.int32))
        packed = torch.arange(mask.shape[1]) < torch.tensor(lengths).unsqueeze(1)  # columns have no place for padding
        advice = "Leave top_p as OpenRLHF passes it to the agent."
        require_kept([row.kept or empty for row in known], packed.numpy(), advice)
    elif columns:
        raise EngineError(
            "--rollout.top_p must be below 1 if an agent truncates its requests, got 1.0. π is renormalized over the "
            "kept ids in every sequence, or in none. Set --rollout.top_p, and leave the agent's parameters as they are."
        )
    return known


def joined(rows: Sequence[SampledRow]) -> SampledRow:
    """Returns the rows of several sequences as one."""
    ids, logp, version = (np.concatenate(column) for column in zip(*(row[:3] for row in rows), strict=True))
    columns = [row.kept for row in rows if row.kept is not None]
    return SampledRow(ids, logp, version, joined_columns(columns) if columns else None)

"""Per-token data that the sampler recorded besides log μ: its top-K, the ids that truncation kept, and its version.

vLLM's records travel through TRL's lists inside the log-probs themselves, as `RecordedLogprob`, so multi-turn loops
need no code here. A `rollout_func` returns them as fields, one entry per completion:

    {"prompt_ids": ..., "completion_ids": ..., "logprobs": ...,
     "trustrl_topk": [(ids, logp), ...],   # (T, K) each; id −1 where no token was sampled
     "trustrl_version": [[12, 12, 13], ...],  # the trainer's step whose weights drew each token
     "trustrl_kept": [[[5, 9], [7], ...], ...],  # the ids that top-p, top-k, or min-p kept at each token
     "trustrl_replica": ["10.0.0.7:8000", ...]}  # the server that sampled each completion
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trustrl.engines.common.kept_columns import KeptColumn, check_limit, column_of, require_kept
from trustrl.engines.common.sampler_fields import REPLICA
from trustrl.engines.common.step_check import missing_logps
from trustrl.engines.vllm.decode_record import RecordedLogprob
from trustrl.errors import EngineError, MissingDataError, RecordError

TOPK, VERSION, KEPT = "trustrl_topk", "trustrl_version", "trustrl_kept"
"""The fields of a `rollout_func`'s result. They are removed before TRL passes the others to reward functions."""


class SampledRows(NamedTuple):
    """Records of one rollout's completions, as lists; None if the sampler did not record them."""

    logp: list[list[Any]] | None = None
    topk: list[Any] | None = None
    version: list[Any] | None = None
    kept: list[Any] | None = None
    replica: list[Any] | None = None


NOT_RECORDED = SampledRows()
"""The records of a sampler that made none."""


def take(generated: tuple[Any, ...]) -> SampledRows:
    """Returns the records in the result of TRL's `_generate`, and removes the fields of a `rollout_func`.

    Args:
        generated: The result. The function searches it, because its order differs between releases of TRL.

    Raises:
        NonFiniteError: If a log-prob is None, which TRL makes of vLLM's NaN and could not turn into a tensor.
    """
    for part in generated:
        absent = sum(row.count(None) for row in part if isinstance(row, list)) if isinstance(part, list) else 0
        if absent:
            raise missing_logps(absent, sum(len(row) for row in part))
    fields = next((part for part in generated if isinstance(part, dict)), {})
    rows = next((part for part in generated if _holds_records(part)), None)
    return SampledRows(rows, *(fields.pop(name, None) for name in (TOPK, VERSION, KEPT, REPLICA)))


def topk_tensors(rows: SampledRows, rollout: dict[str, Any], k: int) -> tuple[Tensor, Tensor]:
    """Returns μ's top-K at the completion tokens: (B, T, K) ids (−1 if not sampled) and log-probs (−inf).

    Raises:
        EngineError: If the completions are not the tokens that vLLM sampled.
        MissingDataError: If the sampler recorded no top-K.
        RecordError: If a `rollout_func` returned tables of another shape.
    """
    like = rollout["completion_ids"]
    ids = np.full((*like.shape, k), -1, np.int32)
    logp = np.full((*like.shape, k), -np.inf, np.float32)
    if rows.topk is not None:
        _place_fields(rows.topk, rollout["completion_mask"], ids, logp)
    elif rows.logp is not None:
        tokens = like.cpu().numpy()
        for row, values in enumerate(rows.logp):
            _place_records(values, tokens[row], ids[row], logp[row])
    else:
        raise MissingDataError(
            f"The sampler must record its {k} most probable ids at each token, got none. A rollout_func returns them "
            f"as {TOPK!r}; with vLLM, TRL must generate through trainer.vllm_generation. "
            "Regions on the sampled token need no such record: try trustrl.preset('dppo-binary-tv')."
        )
    return torch.from_numpy(ids).to(like.device), torch.from_numpy(logp).to(like.device)


def kept_columns(rows: SampledRows, rollout: dict[str, Any]) -> list[KeptColumn]:
    """Returns the ids that truncated sampling kept, one column per completion.

    Raises:
        EngineError: If truncation kept more ids than are recorded.
        MissingDataError: If the sampler did not record them.
    """
    in_loss = in_loss_of(rollout)
    found = rows.kept if rows.kept is not None else [_kept_of(values) for values in rows.logp or []]
    columns = [column_of(row) for row in found] or [column_of([])] * len(in_loss)
    if len(columns) != len(in_loss):
        raise RecordError(f"{KEPT} must have one entry per completion, got {len(columns)} for {len(in_loss)}.")
    require_kept(columns, in_loss.cpu().numpy(), f"A rollout_func returns them as {KEPT!r}. Or sample with top_p=1.0.")
    return columns


def experts_tensor(rows: SampledRows, like: Tensor) -> Tensor:
    """Returns the (B, T, layers × experts per token) experts that vLLM used at each token; −1 if it sampled none there.

    Args:
        rows: The records.
        like: The (B, T) completion ids.

    Raises:
        MissingDataError: If vLLM's answers carry no routing.
    """
    values = [(row, t, x) for row, found in enumerate(rows.logp or []) for t, x in enumerate(found)]
    sampled = [(row, t, x) for row, t, x in values if isinstance(x, RecordedLogprob)]
    found = [(row, t, x.source.experts[x.position]) for row, t, x in sampled if x.source.experts is not None]
    if not found or len(found) < len(sampled):
        raise MissingDataError(
            "vLLM must return the routed experts of each token, got none. Generate through trainer.vllm_generation, "
            "or set recording.experts=False."
        )
    experts = torch.full((*like.shape, len(found[0][2])), -1, dtype=torch.int16)
    for row, t, chosen in found:
        experts[row, t] = torch.from_numpy(chosen)
    return experts.to(like.device)


def version_tensor(rows: SampledRows, like: Tensor, version: int) -> Tensor:
    """Returns the (B, T) version of the weights that drew each token.

    Args:
        rows: The records.
        like: The (B, T) completion ids.
        version: The version of tokens without a record.

    Raises:
        RecordError: If a `rollout_func` returned more versions than tokens.
    """
    versions = torch.full(like.shape, version, dtype=torch.int64)
    for row, recorded in enumerate(rows.version or []):
        if len(recorded) > like.shape[1]:
            raise RecordError(
                f"{VERSION}[{row}] must have one version per completion token, got {len(recorded)} for at most "
                f"{like.shape[1]} tokens."
            )
        versions[row, : len(recorded)] = torch.as_tensor(recorded, dtype=torch.int64)
    return versions.to(like.device)


def in_loss_of(rollout: dict[str, Any]) -> Tensor:
    """Returns the (B, T) mask of the tokens that the policy produced: neither padding nor a tool's result."""
    in_loss = rollout["completion_mask"].bool()
    tools = rollout.get("tool_mask")
    return in_loss if tools is None else in_loss & tools.bool()


def turn_tensor(rollout: dict[str, Any]) -> Tensor:
    """Returns the (B, T) number of the turn that sampled each token, from 0; −1 at tool results and padding."""
    sampled = in_loss_of(rollout)
    begins = sampled & ~torch.nn.functional.pad(sampled, (1, -1))
    return torch.where(sampled, begins.cumsum(-1) - 1, -1)


def _holds_records(part: Any) -> bool:
    if not isinstance(part, list):
        return False
    return any(isinstance(row, list) and any(isinstance(x, RecordedLogprob) for x in row) for row in part)


def _kept_of(values: list[Any]) -> list[Any]:
    """Returns the kept ids at each token of one completion; none where no token was sampled."""
    sources = {id(value.source): value.source for value in values if isinstance(value, RecordedLogprob)}
    kept: dict[int, list[Any]] = {}
    for name, source in sources.items():
        column = source.kept()
        if column is not None:
            check_limit(column, source.max_kept)
            kept[name] = column.rows()
    known = ((kept.get(id(v.source)), v.position) if isinstance(v, RecordedLogprob) else (None, 0) for v in values)
    return [() if rows is None else rows[position] for rows, position in known]


def _place_records(values: list[Any], tokens: np.ndarray, ids: np.ndarray, logp: np.ndarray) -> None:
    """Writes one completion's records at the positions of their log-probs."""
    at: dict[int, tuple[Any, list[int], list[int]]] = {}
    for t, value in enumerate(values):
        if isinstance(value, RecordedLogprob):
            _, positions, places = at.setdefault(id(value.source), (value.source, [], []))
            positions.append(value.position)
            places.append(t)
    for source, positions, places in at.values():
        source_ids, source_logp = (part[positions] for part in source.table())
        if not np.array_equal(source_ids[:, 0], tokens[places]):
            raise EngineError(
                "Completions must consist of the tokens that vLLM sampled, and they do not: TRL or a subclass "
                "tokenized them again. Keep the sampled ids."
            )
        ids[places], logp[places] = source_ids[:, 1:], source_logp[:, 1:]


def _place_fields(topk: list[Any], mask: Tensor, ids: np.ndarray, logp: np.ndarray) -> None:
    lengths, k = mask.sum(-1).tolist(), ids.shape[-1]
    if len(topk) != len(ids):
        raise RecordError(f"{TOPK} must have one entry per completion, got {len(topk)} for {len(ids)}.")
    for row, (row_ids, row_logp) in enumerate(topk):
        found_ids, found_logp = np.asarray(row_ids), np.asarray(row_logp, np.float32)
        length = len(found_ids)
        if (
            found_ids.ndim != 2
            or found_ids.shape != found_logp.shape
            or found_ids.shape[1] < k
            or length < lengths[row]
        ):
            raise RecordError(
                f"{TOPK}[{row}] must be ids and log-probs of shape ({lengths[row]}, {k}) or wider, got "
                f"{found_ids.shape} and {found_logp.shape}. Record at least as many ids as the region reads."
            )
        ids[row, :length], logp[row, :length] = found_ids[:, :k], found_logp[:, :k]

"""Per-token data that the sampler recorded besides log μ: its top-K, the ids that truncation kept, and its version.

vLLM's records travel through TRL's lists inside the log-probs themselves, as `RecordedLogprob`, so multi-turn loops
need no code here. A `rollout_func` returns them as fields, one entry per completion:

    {"prompt_ids": ..., "completion_ids": ..., "logprobs": ...,
     "trustrl_topk": [(ids, logp), ...],   # (T, K) each; id −1 where no token was sampled
     "trustrl_version": [[12, 12, 13], ...],  # the trainer's step whose weights drew each token
     "trustrl_kept": [[[5, 9], [7], ...], ...],  # the ids that top-p, top-k, or min-p kept at each token
     "trustrl_replica": ["10.0.0.7:8000", ...]}  # the server that sampled each completion

`rollout_fields` writes them from the records of any sampler.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trustrl.engines.common.kept_columns import KeptColumn, check_limit, column_of, require_kept
from trustrl.engines.common.sampled_record import UNKNOWN, SampledRecord
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


def rollout_fields(prompts: Sequence[list[int]], records: Sequence[SampledRecord]) -> dict[str, Any]:
    """Returns what a `rollout_func` returns for completions of one request each.

    Args:
        prompts: The ids of each completion's prompt.
        records: The record of each completion, from the adapter of its sampler. Its versions must be the trainer's
            steps.

    Raises:
        MissingDataError: If the sampler knows the version of some tokens only.
    """
    fields: dict[str, Any] = {
        "prompt_ids": list(prompts),
        "completion_ids": [record.tokens.tolist() for record in records],
        "logprobs": [record.logp.tolist() for record in records],
    }
    if any(record.topk_ids.shape[1] for record in records):
        fields[TOPK] = [(record.topk_ids, record.topk_logp) for record in records]
    if any(record.kept is not None for record in records):
        fields[KEPT] = [() if record.kept is None else record.kept.rows() for record in records]
    if any(record.replica is not None for record in records):
        fields[REPLICA] = [record.replica for record in records]
    versions = [np.full(len(record), UNKNOWN) if record.version is None else record.version for record in records]
    unknown, tokens = sum(int((version == UNKNOWN).sum()) for version in versions), sum(map(len, records))
    if 0 < unknown < tokens:
        raise MissingDataError(
            f"The sampler must know the version of each token or of none, got {unknown} unknown of {tokens}. Abort or "
            "retract its requests before each update of its weights, and flush its cache."
        )
    if not unknown:
        fields[VERSION] = [version.tolist() for version in versions]
    return fields


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


def topk_rows(rows: SampledRows, rollout: dict[str, Any], k: int) -> dict[str, Tensor]:
    """Returns μ's top-K at the N tokens in the loss: (N, K) ids (−1 if not sampled) and log-probs (−inf).

    Raises:
        EngineError: If the completions are not the tokens that vLLM sampled.
        MissingDataError: If the sampler recorded no top-K.
        RecordError: If a `rollout_func` returned tables of another shape.
    """
    like, in_loss = rollout["completion_ids"], in_loss_of(rollout).cpu().numpy()
    if rows.topk is not None:
        tables = _fields(rows.topk, rollout["completion_mask"], k)
    elif rows.logp is not None:
        tokens = like.cpu().numpy()
        tables = (_records(values, tokens[row], k) for row, values in enumerate(rows.logp))
    else:
        raise MissingDataError(
            f"The sampler must record its {k} most probable ids at each token, got none. A rollout_func returns them "
            f"as {TOPK!r}; with vLLM, TRL must generate through trainer.vllm_generation. "
            "Regions on the sampled token need no such record: try trustrl.preset('dppo-binary-tv-capped')."
        )
    chosen = [[x[: len(mask)][mask[: len(x)]] for x in pair] for pair, mask in zip(tables, in_loss, strict=True)]
    ids, logp = (torch.from_numpy(np.concatenate(parts)).to(like.device) for parts in zip(*chosen, strict=True))
    return {"topk_ids": ids, "topk_logp": logp}


def kept_columns(rows: SampledRows, rollout: dict[str, Any]) -> list[KeptColumn]:
    """Returns the ids that truncated sampling kept at the tokens in the loss, one column per completion.

    Raises:
        EngineError: If truncation kept more ids than are recorded.
        MissingDataError: If the sampler did not record them.
    """
    in_loss = in_loss_of(rollout).cpu().numpy()
    kept = rows.kept if rows.kept is not None else [_kept_of(values) for values in rows.logp or []]
    columns = [column_of(row) for row in kept] or [column_of([])] * len(in_loss)
    if len(columns) != len(in_loss):
        raise RecordError(f"{KEPT} must have one entry per completion, got {len(columns)} for {len(in_loss)}.")
    require_kept(columns, in_loss, f"A rollout_func returns them as {KEPT!r}. Or sample with top_p=1.0.")
    return [column.only(mask) for column, mask in zip(columns, in_loss, strict=True)]


def expert_rows(rows: SampledRows, rollout: dict[str, Any]) -> list[Tensor]:
    """Returns the experts that vLLM used at the tokens in the loss: (tokens, layers × experts per token) per sequence.

    Tokens that vLLM did not sample have −1.

    Raises:
        MissingDataError: If vLLM's answers carry no routing.
    """
    values = [((row, t), x) for row, row_values in enumerate(rows.logp or []) for t, x in enumerate(row_values)]
    sampled = [(place, x) for place, x in values if isinstance(x, RecordedLogprob)]
    routing = {place: x.source.experts[x.position] for place, x in sampled if x.source.experts is not None}
    if not routing or len(routing) < len(sampled):
        raise MissingDataError(
            "vLLM must return the routed experts of each token, got none. Generate through trainer.vllm_generation, "
            "or set recording.experts=False."
        )
    missing = np.full_like(next(iter(routing.values())), -1)
    experts: list[Tensor] = []
    for row, mask in enumerate(in_loss_of(rollout).cpu().numpy()):
        chosen = [routing.get((row, t), missing) for t in mask.nonzero()[0].tolist()]
        table = np.stack(chosen) if chosen else np.empty((0, len(missing)))
        experts.append(torch.from_numpy(table.astype(np.int16)).to(rollout["completion_ids"].device))
    return experts


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


def _records(values: list[Any], tokens: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns one completion's records, (T, K) each, at the positions of their log-probs."""
    ids, logp = np.full((len(tokens), k), -1, np.int32), np.full((len(tokens), k), -np.inf, np.float32)
    positions_of: dict[int, tuple[Any, list[int], list[int]]] = {}
    for t, value in enumerate(values):
        if isinstance(value, RecordedLogprob):
            _, positions, places = positions_of.setdefault(id(value.source), (value.source, [], []))
            positions.append(value.position)
            places.append(t)
    for source, positions, places in positions_of.values():
        source_ids, source_logp = (part[positions] for part in source.table())
        if not np.array_equal(source_ids[:, 0], tokens[places]):
            raise EngineError(
                "Completions do not consist of the tokens that vLLM sampled: TRL or a subclass "
                "tokenized them again. Keep the sampled ids."
            )
        ids[places], logp[places] = source_ids[:, 1:], source_logp[:, 1:]
    return ids, logp


def _fields(topk: list[Any], mask: Tensor, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the tables of a `rollout_func`, (length, K) each."""
    lengths = mask.sum(-1).tolist()
    if len(topk) != len(lengths):
        raise RecordError(f"{TOPK} must have one entry per completion, got {len(topk)} for {len(lengths)}.")
    tables: list[tuple[np.ndarray, np.ndarray]] = []
    for row, pair in enumerate(topk):
        ids, logp = np.asarray(pair[0]), np.asarray(pair[1], np.float32)
        if ids.ndim != 2 or ids.shape != logp.shape or ids.shape[1] < k or len(ids) < lengths[row]:
            raise RecordError(
                f"{TOPK}[{row}] must be ids and log-probs of shape ({lengths[row]}, {k}) or wider, got "
                f"{ids.shape} and {logp.shape}. Record at least as many ids as the region reads."
            )
        tables.append((ids[:, :k].astype(np.int32), logp[:, :k]))
    return tables

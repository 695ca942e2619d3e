"""The anchors of an update: μ as the sampler recorded it, and π', the policy before the first step.

The names of the fields added to verl's batch start with `trustrl_`. The fields stay on the rank that created them.
Bytes per token there: 4 for a log-prob, 8 K + 4 for a top-K, 2 D + 4 (in bf16) for exact divergences. μ's top-K arrives
with the rollout: 8 K bytes per response token through verl's queue.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from trustrl.config.axes import Needs
from trustrl.core.records import TopK
from trustrl.engines.common.kept_columns import KeptColumn, column_of, require_kept
from trustrl.engines.common.sampler_fields import KEPT_COUNTS, KEPT_IDS, REPLICA
from trustrl.engines.common.step_check import check_recorded
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.common.vocabulary_read import packed_kept
from trustrl.engines.verl.response_layout import check_rows, in_loss, like_responses, padded, taken
from trustrl.errors import EngineError, MissingDataError

PASS = "trustrl_pass"
"""The key of batches whose forward pass must return more than log-probs: `record`, `train`, or `first` for an update
whose own pass is π'."""

SAMPLED_IDS, SAMPLED_LOGP = "teacher_ids", "teacher_logprobs"
"""μ's top-K, (B, R, K): the fields that verl passes from agent loops to workers. verl's distillation uses them too."""

REQUESTS = "trustrl_requests"
"""The key of `extra_fields` with the requests behind a response, (n, 3): first token, one after the last, version."""

VERSION, TURN = "trustrl_version", "trustrl_turn"
"""The fields added to a batch: the version of the weights and the number of the request that drew each token."""

NOT_SCORED, FAULT = -1, "trustrl_fault"
"""The ids of a sequence that the sampler could not score, and the key of the reason in its `extra_fields`."""


def mark(data: Any) -> str | None:
    """Returns the value of that key, or None for a batch that verl's own pass is enough for."""
    return tu.get_non_tensor_data(data=data, key=PASS, default=None)


def own_forward(needs: Needs, *, bypass: bool, truncated: bool) -> bool:
    """Returns whether π' must be recorded: its distribution always, its log-probs if verl did not compute them.

    verl's log-probs are those of the whole vocabulary, also if tokens were drawn from a part of it.
    """
    if truncated and "proximal" in needs.anchors:
        return True
    if needs.anchor == "proximal" and (needs.topk or needs.full):
        return True
    return bypass and "proximal" in needs.anchors


def bypassed(data: Any) -> bool:
    """Returns whether verl replaced the trainer's log-probs with the sampler's (`bypass_mode`)."""
    old, sampled = data["old_log_probs"], data.get("rollout_log_probs", None)
    if sampled is None:
        return False
    old, sampled = (x.values() if x.is_nested else x for x in (old, sampled))
    return old.shape == sampled.shape and torch.equal(old, sampled)


def check(needs: Needs, data: Any) -> None:
    """Raises if a batch lacks data that the sampler must record.

    Raises:
        MissingDataError: If the data is missing; names the setting to change.
        EngineError: If an agent loop could not record a sequence.
        NonFiniteError: If the sampler recorded NaN at a token in the loss.
    """
    if "behavior" in needs.anchors and data.get("rollout_log_probs", None) is None:
        raise MissingDataError(
            "The sampler must record the log-probs of the tokens it draws, got none. Set "
            "actor_rollout_ref.rollout.calculate_log_probs=True. trustrl never replaces them with recomputed ones; set "
            "region.anchor=proximal to anchor the region on those."
        )
    if (recorded := data.get("rollout_log_probs", None)) is not None:
        check_recorded(padded(recorded), padded(data["response_mask"]).bool())
    # The reasons why agent loops could not record sequences of this batch.
    if reasons := sorted({extra[FAULT] for extra in extra_fields(data) if FAULT in extra}):
        raise EngineError(
            f"The sampler did not record every sequence of a batch. {' '.join(reasons)} Training only on "
            "the other sequences would be biased."
        )
    if needs.topk and needs.anchor == "behavior":
        ids = data.get(SAMPLED_IDS, None)
        if ids is None:
            raise MissingDataError(
                f"The sampler must record its {needs.topk} most probable ids at each token, got none. Set "
                "actor_rollout_ref.rollout.agent.default_agent_loop=trustrl_single_turn_agent (or trustrl_tool_agent), "
                "or set region.anchor=proximal to anchor the region on the trainer's own policy."
            )
        if ids.shape[-1] < needs.topk:
            raise MissingDataError(
                f"The sampler must record {needs.topk} ids at each token, got {ids.shape[-1]}. Record them with one of "
                "trustrl's agent loops, which request as many as the region needs."
            )
        _check_scored(ids, data)


def _check_scored(ids: Any, data: Any) -> None:
    """Raises if a token in the loss lacks the sampler's distribution."""
    for rows in (ids, data[SAMPLED_LOGP]):
        check_rows(rows, data)
    # A tool's tokens have no ids either, and are not in the loss.
    missing = int((taken(ids, in_loss(data))[:, 0] == NOT_SCORED).sum())
    if not missing:
        return
    raise EngineError(
        f"The sampler must record every sequence of a batch, got {missing} tokens without its top-K. The log of the "
        "agent loops has the reason. Training only on the other sequences would be biased."
    )


def extra_fields(data: Any) -> list[dict[str, Any]]:
    """Returns each sequence's `extra_fields`; empty ones for the samples that verl pads batches with."""
    extra = data.get("extra_fields", None)
    known = extra.tolist() if hasattr(extra, "tolist") else extra or [None] * len(data["response_mask"])
    return [fields if isinstance(fields, dict) else {} for fields in known]


def _lengths(data: Any) -> list[int]:
    """Returns the number of response tokens of each sequence."""
    mask = data["response_mask"]
    return mask.offsets().diff().tolist() if mask.is_nested else [mask.shape[1]] * len(mask)


def replicas(data: Any) -> list[str | None]:
    """Returns the name of the server that sampled each sequence; None if it is unknown, or several did."""
    return [extra.get(REPLICA) for extra in extra_fields(data)]


def versions(data: Any, sent: Mapping[int, int]) -> dict[str, Tensor]:
    """Returns the version of the weights and the turn that drew each response token, as fields to add to the batch.

    verl numbers weights by its own steps. The fields number them by the worker's step in which they are on-policy, as
    records do, so a token's age is the number of training steps since its weights were sent.

    Args:
        data: This rank's part of the batch.
        sent: The worker's training steps before each version of the weights was sent to the sampler.

    Returns:
        The fields, or nothing if a token in the loss lacks a version: one of verl's own agent loops made the sequence.
    """
    lengths = _lengths(data)
    drawn = torch.full((2, len(lengths), max(lengths)), NOT_SCORED)
    for row, (extra, length) in enumerate(zip(extra_fields(data), lengths, strict=True)):
        if extra.get(REQUESTS) is not None:
            drawn[:, row, :length] = per_token(extra[REQUESTS], length)
    version, turn = drawn
    # A server may not report its version.
    lacking = (version == NOT_SCORED) & padded(data["response_mask"]).bool().cpu()
    if bool(lacking.any()):
        return {}
    steps = version.clone()
    for number in version.unique().tolist():
        steps[version == number] = _steps_before(number, sent) + 1
    device = data["response_mask"].device
    return {name: like_responses(x.to(device), data) for name, x in ((VERSION, steps), (TURN, turn))}


def per_token(requests: np.ndarray, length: int) -> Tensor:
    """Returns the version of the weights and the number of the request behind each response token, (2, length).

    Args:
        requests: The requests, as `REQUESTS` carries them.
        length: The number of response tokens.
    """
    drawn = torch.full((2, length), NOT_SCORED)
    for turn, (start, stop, version) in enumerate(requests.tolist()):
        drawn[:, start:stop] = torch.tensor([[version], [turn]])
    return drawn


def sequence_versions(data: Any, sent: Mapping[int, int]) -> Tensor | None:
    """Returns the version of the weights that drew each sequence, (B,), numbered as in `versions`.

    verl's own agent loops report only the first and the last version of a sequence.

    Args:
        data: This rank's part of the batch.
        sent: The worker's training steps before each version of the weights was sent to the sampler.

    Returns:
        The versions, or None if a sequence has none, or was drawn by several.
    """
    row_versions: list[int] = []
    for extra in extra_fields(data):
        first, last = extra.get("min_global_steps"), extra.get("max_global_steps")
        if first is None or first != last:
            return None
        row_versions.append(_steps_before(int(first), sent) + 1)
    return torch.tensor(row_versions)


def _steps_before(version: int, sent: Mapping[int, int]) -> int:
    """Returns the worker's training steps before a version was sent; one per version where nobody counted them."""
    if version in sent:
        return sent[version]
    first = min(sent, default=0)  # older ones: a resumed run's rollouts, or a worker without a sampler
    return sent.get(first, 0) - (first - version)


def kept(data: Any) -> dict[str, Tensor]:
    """Returns the ids that truncation kept, as two fields to add to the batch.

    Raises:
        MissingDataError: If the sampler did not record them.
    """
    mask = data["response_mask"]
    columns = [_kept_column(extra, length) for extra, length in zip(extra_fields(data), _lengths(data), strict=True)]
    advice = "Start the run with `python -m trustrl.engines.verl`, or set rollout.top_p=1 and rollout.top_k=-1."
    require_kept(columns, padded(mask).bool().cpu().numpy(), advice)
    fields = {KEPT_IDS: [column.ids for column in columns], KEPT_COUNTS: [column.counts for column in columns]}
    return {
        name: torch.nested.nested_tensor([torch.from_numpy(x) for x in arrays], layout=torch.jagged).to(mask.device)
        for name, arrays in fields.items()
    }


def _kept_column(extra: dict[str, Any], length: int) -> KeptColumn:
    """Returns the kept ids of one response; none for the samples that verl pads batches with."""
    if extra.get(KEPT_IDS) is None:
        return column_of([()] * length)
    return column_of(KeptColumn(extra[KEPT_IDS], extra[KEPT_COUNTS]).rows()[:length])


def kept_ids(data: Any) -> Tensor:
    """Returns the kept ids at the N tokens in the loss of one micro-batch, (N, K); −1 beyond the ids of a token."""
    mask = data["response_mask"]
    ids, counts, masks = (
        [x.cpu().numpy() for x in field.unbind()] for field in (data[KEPT_IDS], data[KEPT_COUNTS], mask)
    )
    columns = [KeptColumn(*pair).only(on != 0) for *pair, on in zip(ids, counts, masks, strict=True)]
    return packed_kept(columns, mask.device)


def logps(data: Any, tokens: TokenPlaces, *, bypass: bool, truncated: bool) -> dict[str, Tensor]:
    """Returns both anchors' log-probs of N tokens of one micro-batch, as far as they are known."""
    recorded = {"behavior_logp": data.get("rollout_log_probs", None), "proximal_logp": data.get("trustrl_logp", None)}
    if recorded["proximal_logp"] is None and not (bypass or truncated):
        recorded["proximal_logp"] = data["old_log_probs"]
    return {name: taken(x, tokens) for name, x in recorded.items() if x is not None}


def topk(needs: Needs, data: Any, tokens: TokenPlaces) -> TopK:
    """Returns the anchor's most probable ids at N tokens in the loss of one micro-batch, (N, K)."""
    own = [f"trustrl_topk_{name}" for name in ("ids", "logp", "tail_logp")]
    names = [SAMPLED_IDS, SAMPLED_LOGP] if needs.anchor == "behavior" else own
    ids, logp, *tail = (taken(data[name], tokens) for name in names)
    return TopK(ids.long(), logp, of=needs.anchor, tail_logp=tail[0] if tail else None)


def record(worker: Any, data: Any, *, distribution: bool) -> dict[str, Tensor]:
    """Runs one pass at the current weights, and returns π' as fields to add to the batch.

    Returns nothing on a pipeline stage without the output layer, which computes no loss.

    Args:
        worker: verl's `TrainingWorker`.
        data: This rank's part of the batch.
        distribution: Whether the region needs more than log-probs.
    """
    # The marks of this pass must not reach verl's own updates.
    copy = data.clone(recurse=False)
    tu.assign_non_tensor(copy, compute_loss=False, calculate_entropy=False, **{PASS: "record"} if distribution else {})
    with _own_outputs(worker.engine) as outputs:
        worker.infer_batch(copy)
    results = {name: x.to(data["response_mask"].device) for name, x in outputs.items()}
    if distribution or not results:
        return {name: x for name, x in results.items() if name.startswith("trustrl_")}
    return {"trustrl_logp": like_responses(no_padding_2_padding(results["log_probs"], data), data)}


@contextmanager
def _own_outputs(engine: Any) -> Iterator[dict[str, Any]]:
    """Collects the model's outputs on this rank. verl returns them only on one rank of a model-parallel group."""
    run, outputs = engine.infer_batch, {}

    def infer_batch(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        outputs.update(out.get("model_output", {}))  # empty on all but the last pipeline stage
        return out

    engine.infer_batch = infer_batch
    try:
        yield outputs
    finally:
        del engine.infer_batch

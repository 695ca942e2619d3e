"""The anchors of an update: μ as the sampler recorded it, and π', the policy before the first step.

The names of the fields added to verl's batch start with `trustrl_`. The fields stay on the rank that created them.
Bytes per token there: 4 for a log-prob, 8 K + 4 for a top-K, 2 D + 4 (in bf16) for exact divergences. μ's top-K arrives
with the rollout: 8 K bytes per response token through verl's queue.
"""

from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from trustrl.config.axes import Needs
from trustrl.core.records import TopK
from trustrl.engines.verl.response_layout import aligned_with_responses, like_responses, padded
from trustrl.errors import EngineError, MissingDataError

PASS = "trustrl_pass"
"""The key set to `record` or `train` on batches whose forward pass must return more than log-probs."""

SAMPLED_IDS, SAMPLED_LOGP = "teacher_ids", "teacher_logprobs"
"""μ's top-K, (B, R, K): the fields that verl passes from agent loops to workers. verl's distillation uses them too."""

NOT_SCORED, FAULT = -1, "trustrl_fault"
"""The ids of a sequence that the sampler could not score, and the key of the reason in its `extra_fields`."""


def own_forward(needs: Needs, *, bypass: bool) -> bool:
    """Returns whether π' must be recorded: its distribution always, its log-probs if verl did not compute them."""
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
        EngineError: If the sampler could not score a sequence.
    """
    if "behavior" in needs.anchors and data.get("rollout_log_probs", None) is None:
        raise MissingDataError(
            "The sampler must record the log-probs of the tokens it draws, got none. Set "
            "actor_rollout_ref.rollout.calculate_log_probs=True. trustrl never replaces them with recomputed ones; set "
            "region.anchor=proximal to anchor the region on those."
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


def _check_scored(ids: Tensor, data: Any) -> None:
    """Raises if an agent loop could not record the sampler's distribution; names the reason."""
    first = (ids.values() if ids.is_nested else ids[data["response_mask"].bool()])[:, 0]
    missing = int((first == NOT_SCORED).sum())
    if not missing:
        return
    extra = data.get("extra_fields", None)
    known = extra.tolist() if hasattr(extra, "tolist") else extra or []
    reasons = sorted({one[FAULT] for one in known if isinstance(one, dict) and FAULT in one})
    raise EngineError(
        f"The sampler must score every sequence of a batch, got {missing} tokens without scores. "
        f"{' '.join(reasons) or 'The log of the agent loops has the reason.'} Training only on the other sequences "
        "would be biased."
    )


def logps(data: Any, *, bypass: bool) -> dict[str, Tensor]:
    """Returns both anchors' log-probs of one micro-batch, (B, R), as far as they are known."""
    found = {"behavior_logp": data.get("rollout_log_probs", None), "proximal_logp": data.get("trustrl_logp", None)}
    if found["proximal_logp"] is None and not bypass:
        found["proximal_logp"] = data["old_log_probs"]
    return {name: padded(x) for name, x in found.items() if x is not None}


def topk(needs: Needs, data: Any) -> TopK:
    """Returns the anchor's most probable ids of one micro-batch, (B, R, K)."""
    if needs.anchor == "behavior":
        ids, logp = (
            aligned_with_responses(data[SAMPLED_IDS], data, -1),
            aligned_with_responses(data[SAMPLED_LOGP], data),
        )
        return TopK(ids.long(), logp, of=needs.anchor)
    ids, logp, tail = data["trustrl_topk_ids"], data["trustrl_topk_logp"], data["trustrl_topk_tail_logp"]
    return TopK(padded(ids, -1).long(), padded(logp), of=needs.anchor, tail_logp=padded(tail))


def record(worker: Any, data: Any, *, distribution: bool) -> dict[str, Tensor]:
    """Runs one pass at the current weights, and returns π' as fields to add to the batch.

    Args:
        worker: verl's `TrainingWorker`.
        data: This rank's part of the batch.
        distribution: Whether the region needs more than log-probs.
    """
    copy = data.clone(recurse=False)
    tu.assign_non_tensor(copy, compute_loss=False, calculate_entropy=False, **{PASS: "record"} if distribution else {})
    out = worker.infer_batch(copy)
    if not distribution:
        return {"trustrl_logp": like_responses(no_padding_2_padding(out["log_probs"], data), data)}
    return {name: out[name] for name in out.keys() if name.startswith("trustrl_")}  # noqa: SIM118 - a TensorDict

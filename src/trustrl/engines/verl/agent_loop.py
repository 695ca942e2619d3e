"""Agent loops that record the sampler's top-K and the version of its weights for every token.

They run verl's own loops and collect the answers of all requests (see `rollout_pieces`). The top-K travels in the
fields that verl passes to its workers. Versions, turns and the replica travel in `extra_fields`.

verl catches every error of an agent loop, logs it, and trains on the remaining sequences (or, in asynchronous modes,
on others instead). Recording fails more often for long sequences, so this would bias training toward short answers.
These loops therefore never raise if recording fails: the sequence carries the reason, and the worker raises it.
"""

import logging
from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from trustrl.engines.common.kept_columns import column_of
from trustrl.engines.common.region_settings import is_region_name
from trustrl.engines.common.sampler_fields import KEPT_COUNTS, KEPT_IDS, REPLICA
from trustrl.engines.refusals.verl_settings import RECORDING
from trustrl.engines.verl import rollout_pieces
from trustrl.engines.verl.anchors import FAULT, NOT_SCORED, REQUESTS, SAMPLED_IDS, SAMPLED_LOGP
from trustrl.engines.verl.verl_config import region_of
from trustrl.world.verl_dataset import SAMPLING

logger = logging.getLogger(__name__)

rollout_pieces.install()


class RecordsTopK:
    """Mixin that records the sampler's side in a verl agent loop: `class Mine(RecordsTopK, MyAgentLoop)`."""

    config: Any

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Runs verl's own loop, with the settings of a benchmark if the prompt has them, and records the answers."""
        sampling_params = {**sampling_params, **((kwargs.get("extra_info") or {}).get(SAMPLING) or {})}
        with rollout_pieces.collecting(*wanted(self.config), sampling_params) as collection:
            output = await super().run(sampling_params, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        for sequence in output if isinstance(output, list) else [output]:
            sequence.extra_fields |= _recorded(sequence, collection)
        return output


def _recorded(output: Any, collection: rollout_pieces.Collection) -> dict[str, Any]:
    """Returns the fields that a sequence carries to the workers: its records, or the reason why they are missing."""
    try:
        placed = rollout_pieces.place(collection, output.prompt_ids, output.response_ids, output.response_mask)
    except Exception as error:
        # Raised here, the error would only remove the sequence, and verl would train on the others.
        logger.exception("trustrl could not record a sequence; the next training step will raise")
        fields: dict[str, Any] = {FAULT: f"{type(error).__name__}: {error}"}
        if collection.k:
            shape = (len(output.response_ids), collection.k)
            # The rows of a batch are stacked, so a sequence that failed has these fields too.
            fields[SAMPLED_IDS] = torch.full(shape, NOT_SCORED, dtype=torch.int32)
            fields[SAMPLED_LOGP] = torch.zeros(shape)
        return fields
    fields = {REQUESTS: placed.requests, REPLICA: placed.replica}
    if collection.k:
        fields[SAMPLED_IDS] = torch.from_numpy(placed.topk_ids)
        fields[SAMPLED_LOGP] = torch.from_numpy(placed.topk_logp)
    if collection.max_kept:
        fields |= dict(zip((KEPT_IDS, KEPT_COUNTS), column_of(placed.kept).narrow(), strict=True))
    return fields


def wanted(config: Any) -> tuple[int, int]:
    """Returns what to ask the sampler for.

    Returns:
        The number of its most probable ids that the run's region needs, 0 if none, and the largest number of ids that
        truncation may keep, 0 if it does not truncate.
    """
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    if not is_region_name(policy_loss.get("loss_mode", "")):
        return 0, 0
    needs = region_of(policy_loss.loss_mode, policy_loss).needs()
    return needs.topk if needs.anchor == "behavior" else 0, policy_loss.get("max_kept", None) or 0


@register(RECORDING["single_turn_agent"])
class SingleTurnTopK(RecordsTopK, SingleTurnAgentLoop):
    """verl's `single_turn_agent` with recording."""


@register(RECORDING["tool_agent"])
class ToolTopK(RecordsTopK, ToolAgentLoop):
    """verl's `tool_agent` with recording."""

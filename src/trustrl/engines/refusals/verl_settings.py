"""Names of verl's settings that the adapter reads, and the settings that a region needs.

Imports neither torch nor verl.
"""

from typing import Any

from trustrl.config.axes import Region
from trustrl.config.sampling_parameters import is_truncated
from trustrl.engines.common import sampler_fields
from trustrl.engines.refusals.rows import SAMPLER_TOPK, Given

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
LOSS, MEGATRON = f"{ACTOR}.policy_loss", f"{ACTOR}.megatron"
MAX_KEPT = f"{LOSS}.max_kept"
THEIR_LOSS, OUR_LOSS = "verl.workers.config.PolicyLossConfig", "trustrl.engines.verl.RegionLossConfig"
AGENT_LOOP, MAX_LOGPROBS = f"{ROLLOUT}.agent.default_agent_loop", f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs"
SGLANG = f"{ROLLOUT}.engine_kwargs.sglang"
MASK_LIMIT = f"{SGLANG}.sampling_mask_max_tokens"

RECORDING = {"single_turn_agent": "trustrl_single_turn_agent", "tool_agent": "trustrl_tool_agent"}
"""Maps verl's agent loops to the ones that record the sampler's side."""

VLLM_MAX_LOGPROBS = 20
"""The largest number of ids that vLLM returns by default."""

SGLANG_MASK_LIMIT = 4096
"""The largest number of kept ids that SGLang returns by default."""


def settings_needed(lookup: Given, region: Region) -> dict[str, Any]:
    """Returns the settings that the region needs and that still have verl's values, with the values to set.

    Every region gets the recording loop: it records the version of the weights and the turn of each token.
    """
    wanted: dict[str, Any] = {}
    if truncated(lookup) and lookup(MAX_KEPT, None) is None:
        wanted[MAX_KEPT] = sampler_fields.MAX_KEPT
        if lookup(f"{LOSS}._target_", THEIR_LOSS) == THEIR_LOSS:
            wanted[f"{LOSS}._target_"] = OUR_LOSS
    loop = lookup(AGENT_LOOP, "single_turn_agent")
    if loop in RECORDING:  # for every region: the loop records versions too
        wanted[AGENT_LOOP] = RECORDING[loop]
    num_ids = recorded_ids(lambda path, default: wanted.get(path, lookup(path, default)), region)
    on_vllm = lookup(f"{ROLLOUT}.name", None) == "vllm"
    if on_vllm and lookup(MAX_LOGPROBS, None) is None and num_ids > VLLM_MAX_LOGPROBS:
        wanted[MAX_LOGPROBS] = num_ids
    return wanted


def truncated(lookup: Given) -> bool:
    """Returns whether tokens are drawn from a part of the vocabulary."""
    return is_truncated(lambda name: lookup(f"{ROLLOUT}.{name}", None))


def recorded_ids(lookup: Given, region: Region) -> int:
    """Returns how many ids the sampler must return at each token; 0 if the sampled one is enough."""
    needs = region.needs()
    topk = needs.topk if SAMPLER_TOPK.holds(needs) else 0
    kept = lookup(MAX_KEPT, None)
    return topk if kept is None else max(topk, kept + 1)

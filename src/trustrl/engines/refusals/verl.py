"""Rows that describe the verl settings that do not work with a region, and the settings that a region needs.

Imports neither torch nor verl: `trustrl plan` reads the same rows as the adapter.
"""

from collections.abc import Mapping
from typing import Any

from trustrl.config.axes import Region
from trustrl.config.terms import FixedLength, SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean, TokenSum
from trustrl.engines.refusals.rows import (
    EXACT,
    EXACT_ON_SAMPLER,
    ON_SAMPLER,
    PER_SEQUENCE,
    SAMPLER_TOPK,
    VOCABULARY,
    Given,
    Refusal,
    other_than,
    plain_sampling,
)

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
LOSS = f"{ACTOR}.policy_loss"
AGENT_LOOP, MAX_LOGPROBS = f"{ROLLOUT}.agent.default_agent_loop", f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs"

REDUCTIONS = {
    "token-mean": TokenMean,
    "token-sum": TokenSum,
    "seq-mean-token-sum": SequenceMeanTokenSum,
    "seq-mean-token-mean": SequenceMeanTokenMean,
    "seq-mean-token-sum-norm": FixedLength,
}
"""Maps verl's `loss_agg_mode`s to reductions. The coefficients themselves always come from verl."""

RECORDING = {"single_turn_agent": "trustrl_single_turn_agent", "tool_agent": "trustrl_tool_agent"}
"""Maps verl's agent loops to the ones that record the sampler's top-K."""

VLLM_MAX_LOGPROBS = 20
"""The largest number of ids that vLLM returns by default."""

_THEIR_BOUNDS = {
    "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "tau_pos": 1.0,
    "tau_neg": 1.05,
}  # fmt: skip


def fitting_reductions(region: Region) -> list[str]:
    """Returns the `loss_agg_mode`s that work with the region."""
    needed = region.needs().reduction
    return [name for name, reduction in REDUCTIONS.items() if needed is None or reduction is needed]


def settings_needed(given: Given, region: Region) -> dict[str, Any]:
    """Returns the settings that the region needs and that still have verl's defaults, with the values to set."""
    needs = region.needs()
    if not SAMPLER_TOPK.holds(needs):
        return {}
    wanted: dict[str, Any] = {}
    loop = given(AGENT_LOOP, "single_turn_agent")
    if loop in RECORDING:
        wanted[AGENT_LOOP] = RECORDING[loop]
    on_vllm = given(f"{ROLLOUT}.name", None) == "vllm"
    if on_vllm and given(MAX_LOGPROBS, None) is None and needs.topk > VLLM_MAX_LOGPROBS:
        wanted[MAX_LOGPROBS] = needs.topk
    return wanted


def _longest(given: Given) -> int:
    return given(f"{ROLLOUT}.prompt_length", 0) + given(f"{ROLLOUT}.response_length", 0)


def _no_room(room: Any, given: Given, region: Region) -> bool:
    return room is not None and room <= _longest(given)


def _too_few_ids(most: int, given: Given, region: Region) -> bool:
    return given(f"{ROLLOUT}.name", None) == "vllm" and 0 <= most < region.needs().topk


def _raw_logprobs(mode: str | None, given: Given, region: Region) -> bool:
    return mode not in (None, "processed_logprobs") and given(f"{ROLLOUT}.temperature", 1.0) != 1.0


def _in_bypass_mode(value: Any, given: Given, region: Region) -> bool:
    return value is not None and given(f"{CORRECTION}.bypass_mode", False)


def _bypassed(name: str, done: str) -> Refusal:
    return Refusal(
        setting=f"{CORRECTION}.{name}",
        must_be="null in bypass mode",
        why="In bypass mode only verl's own loss applies it, so nothing would be "
        f"{done}. Set {CORRECTION}.bypass_mode=False to keep it.",
        refused=_in_bypass_mode,
        example={f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.{name}": "token_k1"},
        region={"anchor": "proximal"},
    )


TRAINER = (
    Refusal(
        setting="trainer.use_v1",
        must_be="True",
        why="verl's legacy trainer replaces loss_mode in bypass mode, so the region would not act.",
        refused=lambda v1, given, region: not v1,
        default=True,
        example={"trainer.use_v1": False},
    ),
    Refusal(
        setting="trainer.v1.trainer_mode",
        must_be="sync",
        why="{region} asks the sampler for its top-K after each response, and asynchronous trainers may replace the "
        "weights before that. trustrl does not record a weight version per token yet. Set "
        "trainer.v1.trainer_mode=sync, or region.anchor=proximal.",
        refused=other_than("sync"),
        default="sync",
        scope=SAMPLER_TOPK,
        example={"trainer.v1.trainer_mode": "separate_async"},
        preset="dppo-topk-tv",
    ),
    Refusal(
        setting="async_training",
        must_be="absent",
        why="{region} asks the sampler for its top-K after each response, and verl's fully asynchronous trainer may "
        "replace the weights before that. Use verl's main_ppo with trainer.v1.trainer_mode=sync, or "
        "region.anchor=proximal.",
        refused=lambda group, given, region: group is not None,
        scope=SAMPLER_TOPK,
        facts=lambda given, region: {"got": "settings"},
        example={"async_training": {"partial_rollout": True}},
        preset="dppo-topk-tv",
    ),
)
"""Rows about verl's trainer."""

ACTOR_LOSS = (
    Refusal(
        setting=f"{ACTOR}.loss_agg_mode",
        must_be="{fitting}",
        why="{region}'s gradient is defined per sequence.",
        refused=lambda mode, given, region: mode not in fitting_reductions(region),
        default="token-mean",
        scope=PER_SEQUENCE,
        facts=lambda given, region: {"fitting": " or ".join(fitting_reductions(region))},
        words={"fitting": "seq-mean-token-mean", "region": "GSPO"},
        example={f"{ACTOR}.loss_agg_mode": "token-mean"},
        preset="gspo",
    ),
    *(
        Refusal(
            setting=f"{ACTOR}.{name}",
            must_be=f"left at {default}",
            why="It belongs to verl's own losses. Set a region's bounds in policy_loss.region.",
            refused=other_than(default),
            default=default,
            example={f"{ACTOR}.{name}": 2 * default},
        )
        for name, default in _THEIR_BOUNDS.items()
    ),
)
"""Rows about the actor's loss."""

SAMPLER_RECORD = (
    Refusal(
        setting=f"{CORRECTION}.rollout_is",
        must_be="null",
        why="{region} is anchored on the sampler: its ratio already contains π'/μ, and verl's correction would apply "
        "it twice. Set it to null, or set region.anchor=proximal to keep it.",
        refused=other_than(None),
        scope=ON_SAMPLER,
        example={f"{CORRECTION}.rollout_is": "token"},
    ),
    Refusal(
        setting=f"{ROLLOUT}.calculate_log_probs",
        must_be="True",
        why="Without it the sampler does not record log-probs.",
        refused=lambda recorded, given, region: not recorded,
        default=False,
        scope=ON_SAMPLER,
        example={f"{ROLLOUT}.calculate_log_probs": False},
    ),
    Refusal(
        setting=f"{ROLLOUT}.logprobs_mode",
        must_be="processed_logprobs",
        why="At {temperature}, raw log-probs are not those of the distribution that the sampler draws from.",
        refused=_raw_logprobs,
        scope=ON_SAMPLER,
        facts=lambda given, region: {"temperature": f"temperature {given(f'{ROLLOUT}.temperature', 1.0):g}"},
        words={"temperature": "a temperature other than 1"},
        example={f"{ROLLOUT}.logprobs_mode": "raw_logprobs", f"{ROLLOUT}.temperature": 0.7},
    ),
)
"""Rows about the log-probs that the sampler records."""

WHOLE_VOCABULARY = (
    Refusal(
        setting=f"{ACTOR}.strategy",
        must_be="fsdp2 or fsdp",
        why="{region} reads the model's last hidden states and its whole output layer. Megatron's split vocabulary "
        "and pipelines are not supported (only trustrl.token_logprobs(shard=...) exists), nor are other engines.",
        refused=lambda strategy, given, region: strategy not in ("fsdp2", "fsdp"),
        default="fsdp",
        scope=VOCABULARY,
        example={f"{ACTOR}.strategy": "megatron"},
        preset="troll",
    ),
    Refusal(
        setting="region.anchor",
        must_be="proximal",
        why="{region} needs the anchor's whole distribution, and a sampler records only some of its ids.",
        refused=lambda anchor, given, region: True,
        scope=EXACT_ON_SAMPLER,
        facts=lambda given, region: {"got": "behavior"},
        example={},
        preset="dppo-full-tv",
    ),
    Refusal(
        setting=f"{ACTOR}.strategy",
        must_be="fsdp2",
        why="{region} keeps a copy of the whole output layer, which FSDP1 shards.",
        refused=other_than("fsdp2"),
        default="fsdp",
        scope=EXACT,
        example={f"{ACTOR}.strategy": "fsdp"},
        preset="dppo-full-tv",
        region={"anchor": "proximal"},
    ),
    Refusal(
        setting=f"{ACTOR}.ulysses_sequence_parallel_size",
        must_be="1",
        why="{region} would see only part of the tokens on each rank.",
        refused=lambda ranks, given, region: ranks > 1,
        default=1,
        scope=VOCABULARY,
        example={f"{ACTOR}.ulysses_sequence_parallel_size": 2},
        preset="troll",
    ),
    Refusal(
        setting="actor_rollout_ref.model.use_fused_kernels",
        must_be="False",
        why="{region} has its own fused pass, which verl's would replace.",
        refused=lambda fused, given, region: bool(fused),
        default=False,
        scope=VOCABULARY,
        example={"actor_rollout_ref.model.use_fused_kernels": True},
        preset="troll",
    ),
)
"""Rows about access to the model's last hidden states and output layer. Workers check these rows again."""

SAMPLER_DISTRIBUTION = (
    Refusal(
        setting="distillation.enabled",
        must_be="False",
        why="Distillation uses the same fields that carry the sampler's distribution.",
        refused=lambda on, given, region: bool(on),
        default=False,
        scope=VOCABULARY,
        example={"distillation.enabled": True},
        preset="troll",
    ),
    Refusal(
        setting=AGENT_LOOP,
        must_be="{loop}",
        why="verl's own loop does not record the sampler's {k} most probable ids. `python -m trustrl.engines.verl` "
        "sets the loop that does; region.anchor=proximal takes the trainer's own ids instead.",
        refused=lambda loop, given, region: loop in RECORDING,
        default="single_turn_agent",
        scope=SAMPLER_TOPK,
        facts=lambda given, region: {
            "loop": RECORDING[given(AGENT_LOOP, "single_turn_agent")],
            "k": region.needs().topk,
        },
        words={"loop": " or ".join(RECORDING.values()), "k": "K"},
        example={AGENT_LOOP: "tool_agent"},
        preset="dppo-topk-tv",
    ),
    Refusal(
        setting=f"{ROLLOUT}.max_model_len",
        must_be="at least {longest}",
        why="The sampler re-scores the longest sequence, which needs room for one more token.",
        refused=_no_room,
        scope=SAMPLER_TOPK,
        facts=lambda given, region: {"longest": _longest(given) + 1},
        words={"longest": "prompt_length + response_length + 1"},
        example={f"{ROLLOUT}.max_model_len": 100, f"{ROLLOUT}.prompt_length": 60, f"{ROLLOUT}.response_length": 40},
        preset="dppo-topk-tv",
    ),
    Refusal(
        setting=MAX_LOGPROBS,
        must_be="at least {k}",
        why="vLLM returns at most the number of ids that it was started with. Add +" + MAX_LOGPROBS + "={k}.",
        refused=_too_few_ids,
        default=VLLM_MAX_LOGPROBS,
        scope=SAMPLER_TOPK,
        facts=lambda given, region: {"k": region.needs().topk},
        words={"k": "K"},
        example={f"{ROLLOUT}.name": "vllm", MAX_LOGPROBS: 10},
        preset="dppo-topk-tv",
    ),
)
"""Rows about recording the sampler's top-K and passing it to the workers."""

SAMPLING = tuple(row for name, row in plain_sampling(ROLLOUT).items() if name != "min_p")  # verl has no min_p
"""Rows about the distribution that the sampler draws from."""

ROWS = (
    *TRAINER,
    *ACTOR_LOSS,
    *SAMPLER_RECORD,
    _bypassed("rollout_is", "corrected"),
    _bypassed("rollout_rs", "rejected"),
    *WHOLE_VOCABULARY,
    *SAMPLER_DISTRIBUTION,
    *SAMPLING,
)
"""Every row, in the order of the check."""

WORKING: Mapping[str, Any] = {
    f"{ROLLOUT}.calculate_log_probs": True,
    f"{ACTOR}.strategy": "fsdp2",
    AGENT_LOOP: "trustrl_single_turn_agent",
}
"""Settings that work with every preset that verl supports. Each row's `example` changes one of them."""

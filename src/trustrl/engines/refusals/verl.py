"""Rows that describe the verl settings that do not work with a region, and the settings that a region needs.

Imports neither torch nor verl: `trustrl plan` reads the same rows as the adapter.
"""

from collections.abc import Callable
from typing import Any

from trustrl.config.axes import Region
from trustrl.config.sampling_parameters import PROCESSED, logprobs_kind
from trustrl.config.terms import FixedLength, SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean, TokenSum
from trustrl.engines.refusals.rows import (
    DRAFTS_ON_CPU,
    EXACT,
    EXACT_ON_SAMPLER,
    ON_SAMPLER,
    VOCABULARY,
    VOCABULARY_OR_TRUNCATED,
    Given,
    Refusal,
    Scope,
    average_per_sequence,
    is_set,
    no_penalty,
    unfit,
)
from trustrl.engines.refusals.verl_settings import (
    ACTOR,
    AGENT_LOOP,
    CORRECTION,
    MASK_LIMIT,
    MAX_KEPT,
    MAX_LOGPROBS,
    MEGATRON,
    RECORDING,
    ROLLOUT,
    SGLANG,
    SGLANG_MASK_LIMIT,
    VLLM_MAX_LOGPROBS,
    recorded_ids,
    truncated,
)

REDUCTIONS = {
    "token-mean": TokenMean,
    "token-sum": TokenSum,
    "seq-mean-token-sum": SequenceMeanTokenSum,
    "seq-mean-token-mean": SequenceMeanTokenMean,
    "seq-mean-token-sum-norm": FixedLength,
}
"""Maps verl's `loss_agg_mode`s to reductions. The coefficients themselves always come from verl."""

RECORDED_IDS = Scope("Top-K on the sampler, and all with truncated sampling", lambda needs: True)

_THEIR_BOUNDS = {
    "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "tau_pos": 1.0,
    "tau_neg": 1.05,
}  # fmt: skip


def _bypassed(name: str, done: str) -> Refusal:
    return Refusal(
        setting=f"{CORRECTION}.{name}",
        must_be="null in bypass mode",
        why="In bypass mode only verl's own loss applies it, so nothing would be "
        f"{done}. Set {CORRECTION}.bypass_mode=False to keep it.",
        refused=lambda got, lookup, region: got is not None and lookup(f"{CORRECTION}.bypass_mode", False),
    )


def _experimental(group: str, what: str, more: str = "") -> Refusal:
    return Refusal(
        setting=group,
        must_be="absent",
        why=f"verl's experimental {what} trainer is built on its legacy trainer, which replaces loss_mode in bypass "
        "mode, so the region would not act. Use verl's main_ppo with trainer.v1.trainer_mode=separate_async"
        f"{more}.",
        facts=lambda lookup, region: {"got": "settings"},
    )


def _where_vocabulary_is_read(
    refused: Callable[[Any], bool], on: str | None = None
) -> Callable[[Any, Given, Region], bool]:
    """Returns a `Refusal.refused` for regions that read more than the sampled token, or their log-probs inside it.

    Args:
        refused: Returns whether a value is refused.
        on: The engine's strategy; None for every one.
    """
    return lambda got, lookup, region: (
        refused(got)
        and (VOCABULARY.holds(region.needs()) or lookup(MAX_KEPT, None) is not None)
        and on in (None, lookup(f"{ACTOR}.strategy", None))
    )


def _on_megatron(setting: str, why: str, must_be: str = "False", refused: Callable[[Any], bool] = bool) -> Refusal:
    """Returns the row of a setting that does not work with a region that reads Megatron's output layer."""
    return Refusal(
        setting,
        must_be,
        why,
        refused=_where_vocabulary_is_read(refused, on="megatron"),
        scope=VOCABULARY_OR_TRUNCATED,
    )


def _on_sglang(lookup: Given) -> bool:
    return lookup(f"{ROLLOUT}.name", None) == "sglang"


def _mask_limit(lookup: Given) -> int:
    return lookup(MASK_LIMIT, None) or SGLANG_MASK_LIMIT


TRAINER = (
    Refusal(
        setting="trainer.use_v1", must_be="True", default=True, refused=lambda v1, lookup, region: not v1,
        why="verl's legacy trainer replaces loss_mode in bypass mode, so the region would not act.",
    ),
    _experimental("async_training", "fully asynchronous"),
    _experimental("rollout", "one-step-off-policy", " and trainer.v1.separate_async.parameter_sync_step=1"),
)  # fmt: skip
"""Rows about verl's trainer."""

ACTOR_LOSS = (
    average_per_sequence(f"{ACTOR}.loss_agg_mode", REDUCTIONS, "seq-mean-token-mean", "token-mean"),
    *(
        Refusal(
            f"{ACTOR}.{name}", f"left at {default}",
            "It belongs to verl's own losses. Set a region's bounds in policy_loss.region.", default,
        )
        for name, default in _THEIR_BOUNDS.items()
    ),
)  # fmt: skip
"""Rows about the actor's loss."""

SAMPLER_RECORD = (
    Refusal(
        setting=f"{CORRECTION}.rollout_is", must_be="null", scope=ON_SAMPLER,
        why="{region} is anchored on the sampler: its ratio already contains π'/μ, and verl's correction would apply "
        "it twice. Set it to null, or set region.anchor=proximal to keep it.",
    ),
    Refusal(
        setting=f"{ROLLOUT}.calculate_log_probs", must_be="True", default=False, scope=ON_SAMPLER,
        refused=lambda recorded, lookup, region: not recorded, why="Without it the sampler does not record log-probs.",
    ),
    *(
        Refusal(
            setting=setting, must_be=PROCESSED, default=PROCESSED, scope=ON_SAMPLER,
            refused=lambda mode, lookup, region: logprobs_kind(mode) == "raw",
            why="Raw log-probs are those before temperature, penalties and truncation, which each request may set. "
            "They are not those of the distribution that the sampler draws from.",
        )
        for setting in (f"{ROLLOUT}.logprobs_mode", f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode")
    ),
    *(
        Refusal(
            setting=setting, must_be="absent", scope=ON_SAMPLER,
            refused=lambda got, lookup, region: bool(got) and str(got).lower() != "false" and _on_sglang(lookup),
            why=why,
        )
        for setting, why in (
            (
                f"{SGLANG}.rl_on_policy_target",
                "SGLang then rounds its log-probs to bf16, which has three digits. Its enable_deterministic_inference "
                "keeps float32.",
            ),
            (
                f"{SGLANG}.enable_watermark",
                "SGLang returns log-probs from before the watermark, which are not those of the distribution that it "
                "draws from.",
            ),
            (
                "ray_kwargs.ray_init.runtime_env.env_vars.SGLANG_RETURN_ORIGINAL_LOGPROB",
                "SGLang then returns log-probs from before the temperature.",
            ),
        )
    ),
)  # fmt: skip
"""Rows about the log-probs that the sampler records."""

ENGINE = (
    Refusal(
        setting=f"{ACTOR}.strategy", must_be="fsdp2, fsdp, veomni or megatron", default="fsdp",
        scope=VOCABULARY_OR_TRUNCATED,
        refused=_where_vocabulary_is_read(lambda strategy: strategy not in ("fsdp2", "fsdp", "veomni", "megatron")),
        why="{region} reads the model's last hidden states and its output layer, which trustrl does not find in other "
        "engines.",
    ),
    Refusal(
        setting=f"{MEGATRON}.dynamic_context_parallel", must_be="False",
        refused=lambda on, lookup, region: on and lookup(f"{ACTOR}.strategy", None) == "megatron",
        why="verl then gives each rank other sequences in each micro-batch and returns results on one rank alone, so "
        "anchors and metrics would miss tokens. Use context_parallel_size.",
    ),
    _on_megatron(
        f"{MEGATRON}.use_megatron_fsdp",
        "{region} reads this rank's part of the output layer, which Megatron-FSDP shards again.",
    ),
    _on_megatron(
        f"{MEGATRON}.override_transformer_config.defer_embedding_wgrad_compute",
        "Megatron would wait for gradients of the output layer that {region} computes itself.",
    ),
    _on_megatron(
        "actor_rollout_ref.model.mtp.enable_train",
        "The output layer must return logits for multi-token prediction, and {region} takes its hidden states.",
    ),
    _on_megatron(
        "actor_rollout_ref.model.lora.target_modules",
        "{region} reads the output layer's weight and would miss the part that an adapter adds.",
        must_be="without output_layer", refused=lambda modules: any("output_layer" in name for name in modules or ()),
    ),
    unfit(
        "region.anchor", must_be="proximal",
        why="{region} needs the anchor's whole distribution, and a sampler records only some of its ids.",
        scope=EXACT_ON_SAMPLER, facts=lambda lookup, region: {"got": "behavior"},
    ),
    Refusal(
        setting=f"{ACTOR}.strategy", must_be="fsdp2, veomni or megatron", default="fsdp", scope=EXACT,
        refused=lambda strategy, lookup, region: strategy not in ("fsdp2", "veomni", "megatron"),
        why="{region} keeps a copy of the whole output layer, which FSDP1 shards.",
    ),
    Refusal(
        setting="actor_rollout_ref.model.use_fused_kernels", must_be="False", scope=VOCABULARY_OR_TRUNCATED,
        refused=_where_vocabulary_is_read(bool), why="{region} has its own fused pass, which verl's would replace.",
    ),
)  # fmt: skip
"""Rows about the engine that trains, and its output layer. Workers check these rows again."""

SAMPLER_DISTRIBUTION = (
    Refusal(
        setting="distillation.enabled", must_be="False", scope=VOCABULARY, refused=is_set,
        why="Distillation uses the same fields that carry the sampler's distribution.",
    ),
    Refusal(
        setting=AGENT_LOOP, must_be="{loop}", default="single_turn_agent", scope=RECORDED_IDS,
        facts=lambda lookup, region: {"loop": RECORDING[lookup(AGENT_LOOP, "single_turn_agent")]},
        words={"loop": " or ".join(RECORDING.values())},
        refused=lambda loop, lookup, region: loop in RECORDING and bool(recorded_ids(lookup, region)),
        why="verl's own loop does not record the sampler's most probable ids or kept ids. `python -m "
        "trustrl.engines.verl` sets the loop that does.",
    ),
    Refusal(
        setting=f"{ROLLOUT}.name", must_be="vllm or sglang", scope=RECORDED_IDS,
        refused=lambda name, lookup, region: name == "trtllm" and bool(recorded_ids(lookup, region)),
        why="trustrl does not read the ids of TensorRT-LLM. Use vllm, sglang, or a region on the sampled token without "
        "top_p and top_k.",
    ),
    Refusal(
        setting=f"{ROLLOUT}.disaggregation.enabled", must_be="False", default=False, scope=RECORDED_IDS,
        refused=lambda on, lookup, region: bool(on) and bool(recorded_ids(lookup, region)),
        why="verl starts other servers for separate prefill and decode, which do not return ids. Use a region on the "
        "sampled token without top_p and top_k.",
    ),
    Refusal(
        setting=MAX_LOGPROBS, must_be="at least {k}", default=VLLM_MAX_LOGPROBS, scope=RECORDED_IDS,
        facts=lambda lookup, region: {"k": recorded_ids(lookup, region)},
        words={"k": "K, and policy_loss.max_kept + 1"},
        refused=lambda most, lookup, region: (
            lookup(f"{ROLLOUT}.name", None) == "vllm" and 0 <= most < recorded_ids(lookup, region)
        ),
        why="vLLM returns at most the number of ids that it was started with. Add +" + MAX_LOGPROBS + "={k}.",
    ),
    Refusal(
        setting=f"{ROLLOUT}.top_k", must_be="from 1 to {limit}", default=-1, scope=RECORDED_IDS,
        facts=lambda lookup, region: {"limit": _mask_limit(lookup)},
        words={"limit": f"sampling_mask_max_tokens, {SGLANG_MASK_LIMIT} by default, with top_p, top_k or min_p"},
        refused=lambda top_k, lookup, region: (
            _on_sglang(lookup) and truncated(lookup) and not 1 <= (top_k or -1) <= _mask_limit(lookup)
        ),
        why="SGLang returns the kept ids of requests with such a top_k only, also where top_p or min_p truncates. Set "
        "it to the largest number of ids that a token may keep, or raise " + MASK_LIMIT + ".",
    ),
)  # fmt: skip
"""Rows about recording the sampler's top-K and passing it to the workers."""

SAMPLING = (
    Refusal(
        setting=MAX_KEPT, must_be="set with top_p, top_k or min_p",
        refused=lambda kept, lookup, region: kept is None and truncated(lookup),
        why="The kept ids must be recorded, so that π is renormalized over the same tokens as μ. `python -m "
        "trustrl.engines.verl` sets it.",
    ),
    Refusal(
        setting=MAX_KEPT,
        must_be="null without top_p, top_k and min_p",
        why="The sampler keeps the whole vocabulary. An agent loop of your own may truncate its requests, and may set "
        "it.",
        refused=lambda kept, lookup, region: (
            kept is not None
            and not truncated(lookup)
            # An agent loop of the user's may draw with other settings than those of `rollout`.
            and lookup(AGENT_LOOP, "single_turn_agent") in {*RECORDING, *RECORDING.values()}
        ),
    ),
    Refusal(
        setting=MAX_KEPT, must_be="null", scope=EXACT,
        why="Exact divergences are those of the whole vocabulary, and π is renormalized over the kept ids. Use a Top-K "
        "region, or set rollout.top_p=1 and rollout.top_k=-1.",
    ),
    *(
        Refusal(
            setting=f"{CORRECTION}.{name}", must_be="null with top_p, top_k or min_p",
            refused=lambda got, lookup, region: got is not None and truncated(lookup),
            why="verl would compare a probability of the whole vocabulary with one of the kept ids.",
        )
        for name in ("rollout_is", "rollout_rs")
    ),
    no_penalty(f"{ROLLOUT}.repetition_penalty"),
    Refusal(
        setting=f"{ROLLOUT}.engine_kwargs.vllm_cpu.speculative_config", must_be="absent",
        refused=lambda drafts, lookup, region: bool(drafts) and lookup(f"{ROLLOUT}.name", None) == "vllm_cpu",
        why=DRAFTS_ON_CPU,
    ),
)  # fmt: skip
"""Rows about the distribution that the sampler draws from."""

ROWS = (
    *TRAINER,
    *ACTOR_LOSS,
    *SAMPLER_RECORD,
    _bypassed("rollout_is", "corrected"),
    _bypassed("rollout_rs", "rejected"),
    *ENGINE,
    *SAMPLER_DISTRIBUTION,
    *SAMPLING,
)
"""Every row, in the order of the check."""

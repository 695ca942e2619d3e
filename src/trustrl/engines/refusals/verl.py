"""Rows that describe the verl settings that do not work with a region, and the settings that a region needs.

Imports neither torch nor verl: `trustrl plan` reads the same rows as the adapter.
"""

from typing import Any

from trustrl.config.axes import Region
from trustrl.config.sampling_parameters import PROCESSED, logprobs_kind
from trustrl.config.terms import FixedLength, SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean, TokenSum
from trustrl.engines.refusals.rows import (
    DRAFTS_ON_CPU,
    EXACT,
    ON_SAMPLER,
    VOCABULARY,
    Given,
    Refusal,
    Scope,
    average_per_sequence,
    fixed,
    is_set,
    other_than,
    plain_sampling,
)
from trustrl.engines.refusals.verl_engine import ENGINE
from trustrl.engines.refusals.verl_settings import (
    ACTOR,
    AGENT_LOOP,
    CORRECTION,
    MAX_KEPT,
    MAX_LOGPROBS,
    RECORDING,
    ROLLOUT,
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


def _too_few_ids(most: int, lookup: Given, region: Region) -> bool:
    return lookup(f"{ROLLOUT}.name", None) == "vllm" and 0 <= most < recorded_ids(lookup, region)


def _rollout_settings_decide(lookup: Given) -> bool:
    """Returns whether the agent loop draws with the settings of `rollout`. A loop of the user's may pass others."""
    return lookup(AGENT_LOOP, "single_turn_agent") in {*RECORDING, *RECORDING.values()}


def _in_bypass_mode(value: Any, lookup: Given, region: Region) -> bool:
    return value is not None and lookup(f"{CORRECTION}.bypass_mode", False)


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
        refused=lambda v1, lookup, region: not v1,
        default=True,
        example={"trainer.use_v1": False},
    ),
    *(
        Refusal(
            setting=group,
            must_be="absent",
            why=f"verl's {what} trainer is built on its legacy trainer, which replaces loss_mode in bypass mode, so "
            "the region would not act. Use verl's main_ppo with trainer.v1.trainer_mode=separate_async"
            f"{more}.",
            refused=lambda group, lookup, region: group is not None,
            facts=lambda lookup, region: {"got": "settings"},
            example={group: example},
        )
        for group, what, more, example in (
            ("async_training", "experimental fully asynchronous", "", {"partial_rollout": True}),
            (
                "rollout",
                "experimental one-step-off-policy",
                " and trainer.v1.separate_async.parameter_sync_step=1",
                {"nnodes": 1},
            ),
        )
    ),
)
"""Rows about verl's trainer."""

ACTOR_LOSS = (
    average_per_sequence(f"{ACTOR}.loss_agg_mode", REDUCTIONS, "seq-mean-token-mean", "token-mean", "token-mean"),
    *(
        fixed(
            f"{ACTOR}.{name}",
            f"left at {default}",
            "It belongs to verl's own losses. Set a region's bounds in policy_loss.region.",
            2 * default,
            default,
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
        refused=lambda recorded, lookup, region: not recorded,
        default=False,
        scope=ON_SAMPLER,
        example={f"{ROLLOUT}.calculate_log_probs": False},
    ),
    *(
        Refusal(
            setting=setting,
            must_be=PROCESSED,
            why="Raw log-probs are those before temperature, penalties and truncation, which each request may set. "
            "They are not those of the distribution that the sampler draws from.",
            refused=lambda mode, lookup, region: logprobs_kind(mode) == "raw",
            default=PROCESSED,
            scope=ON_SAMPLER,
            example={setting: "raw_logprobs"},
        )
        for setting in (f"{ROLLOUT}.logprobs_mode", f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode")
    ),
)
"""Rows about the log-probs that the sampler records."""

SAMPLER_DISTRIBUTION = (
    Refusal(
        setting="distillation.enabled",
        must_be="False",
        why="Distillation uses the same fields that carry the sampler's distribution.",
        refused=is_set,
        default=False,
        scope=VOCABULARY,
        example={"distillation.enabled": True},
        preset="troll",
    ),
    Refusal(
        setting=AGENT_LOOP,
        must_be="{loop}",
        why="verl's own loop does not record the sampler's most probable ids or kept ids. `python -m "
        "trustrl.engines.verl` sets the loop that does.",
        refused=lambda loop, lookup, region: loop in RECORDING and bool(recorded_ids(lookup, region)),
        default="single_turn_agent",
        scope=RECORDED_IDS,
        facts=lambda lookup, region: {"loop": RECORDING[lookup(AGENT_LOOP, "single_turn_agent")]},
        words={"loop": " or ".join(RECORDING.values())},
        example={AGENT_LOOP: "tool_agent"},
        preset="dppo-topk-tv",
    ),
    Refusal(
        setting=f"{ROLLOUT}.name",
        must_be="vllm",
        why="trustrl does not read the ids of SGLang or TensorRT-LLM. Use vllm, or a region on the sampled token "
        "without top_p and top_k.",
        refused=lambda name, lookup, region: name in ("sglang", "trtllm") and bool(recorded_ids(lookup, region)),
        scope=RECORDED_IDS,
        example={f"{ROLLOUT}.name": "sglang"},
        preset="dppo-topk-tv",
    ),
    Refusal(
        setting=f"{ROLLOUT}.disaggregation.enabled",
        must_be="False",
        why="verl starts other servers for separate prefill and decode, which do not return ids. Use a region on the "
        "sampled token without top_p and top_k.",
        refused=lambda on, lookup, region: bool(on) and bool(recorded_ids(lookup, region)),
        default=False,
        scope=RECORDED_IDS,
        example={f"{ROLLOUT}.disaggregation.enabled": True},
        preset="dppo-topk-tv",
    ),
    Refusal(
        setting=MAX_LOGPROBS,
        must_be="at least {k}",
        why="vLLM returns at most the number of ids that it was started with. Add +" + MAX_LOGPROBS + "={k}.",
        refused=_too_few_ids,
        default=VLLM_MAX_LOGPROBS,
        scope=RECORDED_IDS,
        facts=lambda lookup, region: {"k": recorded_ids(lookup, region)},
        words={"k": "K, and policy_loss.max_kept + 1"},
        example={f"{ROLLOUT}.name": "vllm", MAX_LOGPROBS: 10},
        preset="dppo-topk-tv",
    ),
)
"""Rows about recording the sampler's top-K and passing it to the workers."""

SAMPLING = (
    Refusal(
        setting=MAX_KEPT,
        must_be="set with top_p, top_k or min_p",
        why="The kept ids must be recorded, so that π is renormalized over the same tokens as μ. `python -m "
        "trustrl.engines.verl` sets it.",
        refused=lambda kept, lookup, region: kept is None and truncated(lookup),
        example={f"{ROLLOUT}.top_p": 0.9},
    ),
    Refusal(
        setting=MAX_KEPT,
        must_be="null without top_p, top_k and min_p",
        why="The sampler keeps the whole vocabulary. An agent loop of your own may truncate its requests, and may set "
        "it.",
        refused=lambda kept, lookup, region: (
            kept is not None and not truncated(lookup) and _rollout_settings_decide(lookup)
        ),
        example={MAX_KEPT: 1024},
    ),
    Refusal(
        setting=MAX_KEPT,
        must_be="null",
        why="Exact divergences are those of the whole vocabulary, and π is renormalized over the kept ids. Use a Top-K "
        "region, or set rollout.top_p=1 and rollout.top_k=-1.",
        refused=lambda kept, lookup, region: kept is not None,
        scope=EXACT,
        example={MAX_KEPT: 1024, f"{ROLLOUT}.top_p": 0.9},
        preset="dppo-full-tv",
        region={"anchor": "proximal"},
    ),
    *(
        Refusal(
            setting=f"{CORRECTION}.{name}",
            must_be="null with top_p, top_k or min_p",
            why="verl would compare a probability of the whole vocabulary with one of the kept ids.",
            refused=lambda got, lookup, region: got is not None and truncated(lookup),
            example={f"{CORRECTION}.{name}": "token", f"{ROLLOUT}.top_p": 0.9, MAX_KEPT: 1024},
            region={"anchor": "proximal"},
        )
        for name in ("rollout_is", "rollout_rs")
    ),
    plain_sampling(ROLLOUT)["repetition_penalty"],
    Refusal(
        setting=f"{ROLLOUT}.engine_kwargs.vllm_cpu.speculative_config",
        must_be="absent",
        why=DRAFTS_ON_CPU,
        refused=lambda drafts, lookup, region: bool(drafts) and lookup(f"{ROLLOUT}.name", None) == "vllm_cpu",
        example={
            f"{ROLLOUT}.name": "vllm_cpu",
            f"{ROLLOUT}.engine_kwargs.vllm_cpu.speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        },
    ),
)
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

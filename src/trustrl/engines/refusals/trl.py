"""Rows that describe the settings and models that the TRL engine refuses.

The trainer checks `SETTINGS` before the model is loaded, `MODEL` after it, and `SERVER` once vLLM answers. Imports
neither torch nor TRL, so plans and the documentation can read the rows.

In addition to TRL's own settings, a row may read `behavior`, `region`, `vllm_options`, `rollout_func` (True if one is
given), `own_generation` (True if a subclass overrides TRL's generation), `vllm_on_cpu` (True if the installed vLLM runs
on the CPU), and `trl` (the version's leading numbers).
"""

from collections.abc import Mapping
from typing import Any

from trustrl.config.axes import Region
from trustrl.config.sampling_parameters import describes_the_draw, is_truncated, logprobs_kind
from trustrl.config.terms import FixedLength, SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from trustrl.engines.refusals.rows import (
    DRAFTS_ON_CPU,
    EVERY_TOKEN,
    EXACT,
    EXACT_ON_SAMPLER,
    ON_SAMPLER,
    ON_TRAINER,
    PER_SEQUENCE,
    TRUNCATED,
    VOCABULARY,
    VOCABULARY_OR_TRUNCATED,
    Given,
    Refusal,
    average_per_sequence,
    no_penalty,
    switch,
    unfit,
)

OLDEST = (1, 0)
"""The oldest supported TRL, for regions on the sampled token."""

OLDEST_VOCABULARY = (1, 9)
"""The oldest supported TRL for Top-K and TROLL."""

OLDEST_FUSED = (1, 15)
"""The first TRL with a fused output layer, and the oldest supported for exact regions and truncated sampling."""

LUSPO_WITHOUT_PADDING = (1, 10)
"""The first TRL whose `luspo` excludes padding from its average."""

REDUCTIONS = {
    "grpo": SequenceMeanTokenMean,
    "bnpo": TokenMean,
    "dr_grpo": FixedLength,
    "dapo": TokenMean,
    "luspo": SequenceMeanTokenSum,
}
"""TRL's `loss_type`s that clip and differ only in the average. With a region, they choose the average."""

_HARMLESS_GENERATION_KEYS = {
    "seed", "n", "max_tokens", "max_new_tokens", "max_length", "stop", "stop_token_ids",
    "stop_strings", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "detokenize", "use_cache", "cache_implementation", "pad_token_id", "bos_token_id", "eos_token_id",
}  # fmt: skip
_BOUND = "The bound belongs to the region, as in trustrl.preset('ppo', max_decrease=0.2, max_increase=0.28)."
_LIGER = "Liger replaces the model's forward pass or its loss, so the region would have no effect."
_PRESETS = {"cispo": "dapo", "sapo": "grpo", "vespo": "dapo"}
"""TRL's `loss_type`s that are regions of trustrl, and the average that each has in TRL."""


def _samples_itself(lookup: Given) -> bool:
    """Returns whether the user's code generates. It may record log-probs."""
    return bool(lookup("rollout_func", False) or (lookup("own_generation", False) and not lookup("use_vllm", False)))


def truncated(lookup: Given) -> bool:
    """Returns whether tokens are drawn from a part of the vocabulary."""
    return is_truncated(lambda name: lookup(name, None))


def _records_kept(lookup: Given) -> bool:
    """Returns whether the ids that truncation keeps can be recorded."""
    if lookup("trl", ()) < OLDEST_FUSED:
        return False
    return _samples_itself(lookup) or (lookup("use_vllm", False) and lookup("vllm_mode", "colocate") == "colocate")


def _reads_vocabulary(lookup: Given, region: Region) -> bool:
    return VOCABULARY.holds(region.needs()) or truncated(lookup)


def _drafts(lookup: Given, region: Region) -> Mapping[str, Any]:
    drafts = lookup("vllm_options", {}).get("speculative_config")
    return {"got": drafts} if drafts else {}


def _unknown_key(lookup: Given, region: Region) -> Mapping[str, Any]:
    kwargs = lookup("generation_kwargs", {})
    unknown = [key for key in kwargs if key not in _HARMLESS_GENERATION_KEYS] if isinstance(kwargs, Mapping) else []
    return {"key": unknown[0], "got": kwargs[unknown[0]]} if unknown else {}


_LOSS = (
    *(
        Refusal(
            setting="loss_type", must_be="an average",
            refused=lambda got, lookup, region, preset=preset: got == preset,
            why=f"{preset} is a region. Use loss_type={average!r} and region=trustrl.preset({preset!r}).",
        )
        for preset, average in _PRESETS.items()
    ),
    Refusal(
        setting="loss_type", must_be=f"one of {', '.join(REDUCTIONS)}",
        refused=lambda got, lookup, region: got not in {*REDUCTIONS, *_PRESETS},
        why="With a region, loss_type chooses only the average.",
    ),
    Refusal(
        setting="loss_type", must_be="an average other than 'luspo' with TRL below 1.10",
        refused=lambda got, lookup, region: got == "luspo" and lookup("trl", ()) < LUSPO_WITHOUT_PADDING,
        why="Before TRL 1.10, luspo also averages over padding. Run `pip install \"trl>=1.10\"`.",
    ),
    average_per_sequence("loss_type", REDUCTIONS, "'grpo'", None, "This region is defined per sequence.", repr),
    Refusal(
        "importance_sampling_level", "'token'",
        "The region sets the level at which it decides. trustrl.preset('gspo') decides per sequence.",
        "token",
    ),
    Refusal("epsilon", "left at 0.2", _BOUND, 0.2),
    Refusal("epsilon_high", "left at None", _BOUND),
    Refusal("delta", "left at None", _BOUND),
    EVERY_TOKEN,
    Refusal(
        "off_policy_mask_threshold", "None",
        "It is a second region. Use region=trustrl.regions.OPSM(max_drift=...), which drops the same sequences.",
    ),
    switch("use_liger_kernel", _LIGER),
    switch("use_liger_loss", _LIGER),
)  # fmt: skip

_ANCHORS = (
    Refusal(
        setting="behavior", must_be="'sampler' when vLLM generates",
        refused=lambda got, lookup, region: got == "trainer" and lookup("use_vllm", False),
        why="vLLM's log-probs are already recorded. To anchor on the trainer's log-probs instead, set "
        "anchor='proximal' on the region.",
    ),
    Refusal(
        setting="vllm_importance_sampling_correction", must_be="False", scope=ON_SAMPLER,
        refused=lambda got, lookup, region: got and lookup("use_vllm", False),
        why="This region already corrects for the sampler mismatch (π'/μ); TRL's correction would apply it twice. "
        "Regions with anchor='proximal' may keep TRL's correction.",
    ),
    Refusal(
        setting="behavior", must_be="'trainer' when transformers generates", scope=ON_SAMPLER,
        refused=lambda got, lookup, region: (
            got == "sampler" and not lookup("use_vllm", False) and not _samples_itself(lookup)
        ),
        why="transformers does not record log-probs, and {region} is anchored on them. behavior='trainer' records the "
        "trainer's log-probs with one more forward pass. use_vllm=True records vLLM's, and a rollout_func records its "
        "own.",
    ),
    Refusal(
        setting="region", must_be="on a top-K support", scope=EXACT,
        refused=lambda got, lookup, region: region.needs().projects,
        why="A projection of the whole vocabulary needs its logits. Use support='topk'.",
    ),
    Refusal(
        setting="region", must_be="a Top-K or Binary one", scope=EXACT_ON_SAMPLER,
        refused=lambda got, lookup, region: lookup("behavior", "") == "sampler",
        why="Samplers do not record their whole distribution. Regions with anchor='proximal' can be exact.",
    ),
    Refusal(
        setting="vllm_options", must_be="None without a colocated vLLM",
        refused=lambda got, lookup, region: (
            bool(got) and not (lookup("use_vllm", False) and lookup("vllm_mode", "colocate") == "colocate")
        ),
        why="Set the options of a vLLM server on its command line.",
    ),
    Refusal(
        setting="vllm_options['speculative_config']", must_be="left out", facts=_drafts,
        refused=lambda got, lookup, region: bool(_drafts(lookup, region)) and lookup("vllm_on_cpu", False),
        why=DRAFTS_ON_CPU,
    ),
)  # fmt: skip

_SAMPLING = (
    *(
        Refusal(
            setting=name, must_be=str(whole), default=whole,
            refused=lambda got, lookup, region, whole=whole: got != whole and not _records_kept(lookup),
            why="μ would be renormalized over the kept tokens and π would not. Both are where the kept ids are "
            "recorded: by a colocated vLLM or a rollout_func, with TRL 1.15 or newer.",
        )
        for name, whole in (("top_p", 1.0), ("top_k", 0), ("min_p", None))
    ),
    Refusal(
        setting="top_p, top_k and min_p", must_be="left at their defaults", scope=EXACT,
        refused=lambda got, lookup, region: truncated(lookup), facts=lambda lookup, region: {"got": "others"},
        why="Exact divergences are those of the whole vocabulary, and π is renormalized over the kept ids. Use a Top-K "
        "region.",
    ),
    Refusal(
        setting="vllm_importance_sampling_correction", must_be="False with top_p, top_k, or min_p",
        refused=lambda got, lookup, region: got and lookup("use_vllm", False) and truncated(lookup),
        why="TRL's correction divides a probability of the whole vocabulary by one of the kept ids.",
    ),
    no_penalty("repetition_penalty"),
    Refusal("vllm_structured_outputs_regex", "None", TRUNCATED),
    Refusal(
        setting="generation_kwargs[{key!r}]", must_be="left out", facts=_unknown_key, words={"key": "..."},
        refused=lambda got, lookup, region: bool(_unknown_key(lookup, region)),
        why="It may change the distribution that tokens are drawn from, and the trainer cannot see it. Set the "
        "temperature with TRL's own setting.",
    ),
)  # fmt: skip

SETTINGS = (*_LOSS, *_ANCHORS, *_SAMPLING)

MODEL = (
    Refusal(
        setting="The model's output layer", must_be="a plain linear layer",
        refused=lambda got, lookup, region: (
            got is not None and (lookup("trl", ()) >= OLDEST_FUSED or VOCABULARY.holds(region.needs()))
        ),
        why="TRL 1.15 and newer, and Top-K, TROLL, and exact regions, read its weight and would miss the part that an "
        "adapter adds. Leave the output layer out of `target_modules`, `modules_to_save`, and quantization.",
    ),
    Refusal(
        setting="router_aux_loss_coef", must_be="0", default=0, scope=VOCABULARY_OR_TRUNCATED,
        refused=lambda got, lookup, region: bool(got) and _reads_vocabulary(lookup, region),
        why="trustrl's own output layer, which reads more than the sampled token, does not compute router losses.",
    ),
    Refusal(
        setting="DeepSpeed's ZeRO stage", must_be="below 3", default=0, scope=VOCABULARY_OR_TRUNCATED,
        refused=lambda got, lookup, region: got >= 3 and _reads_vocabulary(lookup, region),
        why="trustrl reads the output layer, which stage 3 shards. Use FSDP2.",
    ),
)  # fmt: skip

SERVER = (
    Refusal(
        setting="The vLLM server's logprobs_mode", must_be="'processed_logprobs'", default="processed_logprobs",
        refused=lambda got, lookup, region: not describes_the_draw(
            logprobs_kind(got), temperature=lookup("temperature", 1.0), truncated=truncated(lookup)
        ),
        why="At a temperature other than 1, raw log-probs are not those that vLLM samples from. Restart it with "
        "`--logprobs-mode processed_logprobs`.",
    ),
)  # fmt: skip

ASYNC = (
    unfit(
        "region", "one on the sampled token",
        "AsyncGRPOTrainer's rollout worker requests only the sampled token's log-prob. Use a binary divergence, or "
        "TrustRegionGRPOTrainer.", VOCABULARY,
    ),
    unfit(
        "region.anchor", "'behavior'",
        "AsyncGRPOTrainer makes no forward pass at the weights that sampled, so π' is not recorded.",
        ON_TRAINER, facts=lambda lookup, region: {"got": "proximal"},
    ),
    unfit(
        "region", "defined for an average over tokens", "AsyncGRPOTrainer averages over the tokens of a batch.",
        PER_SEQUENCE,
    ),
    Refusal("epsilon", "left at 0.2", _BOUND, 0.2),
    Refusal("epsilon_high", "None", _BOUND),
    *(row for row in _SAMPLING if row.setting in ("top_p", "top_k", "min_p", "repetition_penalty")),
)  # fmt: skip
"""Rows about `AsyncGRPOTrainer`, which is not a `GRPOTrainer` and has other settings."""

ROWS = (*SETTINGS, *MODEL, *SERVER)
"""Every row, in the order of the check."""

"""Rows that describe the settings and models that the ms-swift engine refuses.

Imports neither torch nor ms-swift. In addition to ms-swift's own settings, a row may read `TRUSTRL_BEHAVIOR`,
`TRUSTRL_REGION`, `padding_free` and `sequence_parallel_size` (of the template), `model` ("multimodal" or absent),
`vocab_size`, and `The model's generation_config`.
"""

from collections.abc import Mapping
from typing import Any

from trustrl.config.axes import Region
from trustrl.config.terms import FixedLength, SequenceMeanTokenMean, TokenMean
from trustrl.engines.refusals.rows import (
    EVERY_TOKEN,
    ON_SAMPLER,
    ON_TRAINER,
    TRUNCATED,
    Given,
    Refusal,
    at_most,
    average_per_sequence,
    no_exact,
    no_penalty,
    no_topk_of_sampler,
    switch,
    whole_vocabulary,
)

OLDEST = (4, 6)
"""The oldest supported ms-swift."""

REDUCTIONS = {"grpo": SequenceMeanTokenMean, "bnpo": TokenMean, "dr_grpo": FixedLength, "dapo": TokenMean}
"""ms-swift's `loss_type`s that clip and differ only in the average. With a region, they choose the average."""

BEHAVIOR, REGION, GENERATION = "TRUSTRL_BEHAVIOR", "TRUSTRL_REGION", "The model's generation_config"
_BOUND = "The bound belongs to the region, which TRUSTRL_REGION describes as JSON."
_NEUTRAL = {
    "min_p": (None, 0.0), "typical_p": (None, 1.0), "epsilon_cutoff": (None, 0.0), "eta_cutoff": (None, 0.0),
    "no_repeat_ngram_size": (None, 0), "bad_words_ids": (None,), "suppress_tokens": (None,), "sequence_bias": (None,),
}  # fmt: skip
"""Fields of a model's generation_config that ms-swift passes on to transformers, with the values that do nothing."""


def _vllm(lookup: Given) -> bool:
    return bool(lookup("use_vllm", False))


def _generation(lookup: Given, region: Region) -> Mapping[str, Any]:
    """Returns the first field of the model's generation_config that changes transformers' sampling."""
    config = lookup(GENERATION, None)
    for name, neutral in _NEUTRAL.items():
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if not _vllm(lookup) and value not in neutral:
            return {"key": name, "got": value}
    return {}


_LOSS = (
    Refusal(
        setting="loss_type", must_be=f"one of {', '.join(REDUCTIONS)}", default="grpo",
        refused=lambda got, lookup, region: got not in REDUCTIONS,
        why="With a region, loss_type chooses only the average. cispo and sapo are presets of TRUSTRL_REGION.",
    ),
    average_per_sequence("loss_type", REDUCTIONS, "'grpo'", "grpo", "This region is defined per sequence.", repr),
    Refusal(
        "importance_sampling_level", "'token'",
        "The region sets the level at which it decides. The preset gspo decides per sequence.", "token",
    ),
    Refusal("epsilon", "left at 0.2", _BOUND, 0.2),
    Refusal("epsilon_high", "left out", _BOUND),
    Refusal("delta", "left out", _BOUND),
    Refusal(
        "rollout_importance_sampling_mode", "left out",
        "A region anchored on the sampler already contains π'/μ; one with anchor=proximal takes its own `correction`.",
    ),
    switch(
        "log_rollout_offpolicy_metrics",
        "ms-swift's loss runs without π' here, so its metrics would compare the current policy with μ. "
        "TRUSTRL_METRICS=all logs trustrl/mismatch_*.",
    ),
    Refusal(
        "off_policy_sequence_mask_delta", "left out",
        "It is a second region. The preset opsm drops the same sequences.",
    ),
    EVERY_TOKEN,
    switch("use_liger_kernel", "Liger replaces the loss, so the region would have no effect."),
)  # fmt: skip

_LAYOUT = (
    switch("padding_free", "It needs flash attention, which we could not run. Batches with padding work."),
    at_most("sequence_parallel_size", 1, "We could not run regions on split sequences."),
    Refusal("model", "a text model", "Regions on images are not supported."),
)  # fmt: skip

_ANCHORS = (
    Refusal(
        setting=BEHAVIOR, must_be="sampler when vLLM generates",
        refused=lambda got, lookup, region: got == "trainer" and _vllm(lookup),
        why="vLLM's log-probs are already recorded. To anchor on the trainer's log-probs instead, set anchor=proximal "
        "on the region.",
    ),
    Refusal(
        setting=BEHAVIOR, must_be="trainer when transformers generates", scope=ON_SAMPLER, default="sampler",
        refused=lambda got, lookup, region: got == "sampler" and not _vllm(lookup),
        why="ms-swift does not record transformers' log-probs, and {region} is anchored on them. "
        "TRUSTRL_BEHAVIOR=trainer takes the trainer's, which ms-swift computes for every rollout; --use_vllm true "
        "records vLLM's.",
    ),
    switch(
        "async_generate",
        "{region} needs the trainer's policy at the rollout's weights, and ms-swift computes it one update later. "
        "Use a region with anchor=behavior.", scope=ON_TRAINER,
    ),
    no_exact(REGION),
    no_topk_of_sampler(
        REGION, "ms-swift requests only the sampled token's log-prob from vLLM. Set anchor=proximal on the region.",
        refused=lambda got, lookup, region: not region.needs().full and _vllm(lookup),
    ),
)  # fmt: skip

_KEPT = (
    "μ would be renormalized over the kept tokens and π would not: ms-swift takes only the sampled token's log-prob "
    "from vLLM's answer. TRL, verl and OpenRLHF record the ids that vLLM keeps."
)

_SAMPLING = (
    whole_vocabulary("top_p", "top_p", "1.0", why=_KEPT),
    Refusal(
        setting="top_k", must_be="{whole}", default=-1,
        refused=lambda got, lookup, region: got > 0 if _vllm(lookup) else not 0 < lookup("vocab_size", 1) <= got,
        facts=lambda lookup, region: {
            "whole": "-1" if _vllm(lookup) else f"the vocabulary's size, {lookup('vocab_size', 1)},"
        },
        words={"whole": "-1 with vLLM, and the vocabulary's size when transformers generates"},
        why="μ would be renormalized over the kept tokens and π would not. ms-swift passes transformers -1 as unset, "
        "and transformers keeps the model's own top_k, or 50.",
    ),
    whole_vocabulary("min_p", "min_p", "0.0", why=_KEPT),
    no_penalty("repetition_penalty"),
    Refusal(
        setting=GENERATION + ".{key}", must_be="left out", facts=_generation, words={"key": "min_p, ..."},
        refused=lambda got, lookup, region: bool(_generation(lookup, region)),
        why="ms-swift passes it on to transformers, and the trainer does not see it.",
    ),
    Refusal("structured_outputs_regex", "left out", TRUNCATED),
    Refusal(
        setting="vllm_engine_kwargs", must_be="without logprobs_mode", default={},
        refused=lambda got, lookup, region: "logprobs_mode" in got,
        why="ms-swift requests processed log-probs, those of the distribution that vLLM samples from.",
    ),
)  # fmt: skip

ROWS = (*_LOSS, *_LAYOUT, *_ANCHORS, *_SAMPLING)
"""Every row, in the order of the check."""

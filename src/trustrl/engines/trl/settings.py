"""Which of TRL's settings go with a region, and a sentence for each that does not."""

from collections.abc import Mapping
from typing import Any, Literal

from trustrl.config.axes import Needs, Region
from trustrl.config.checks import one_of
from trustrl.config.terms import FixedLength, SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from trustrl.engines.settings import PENALISED, TRUNCATED, refuse

Behavior = Literal["sampler", "trainer"]
"""Who says what μ was: the inference engine that drew the tokens, or (transformers generation) the trainer itself."""

REDUCTIONS = {
    "grpo": SequenceMeanTokenMean,
    "bnpo": TokenMean,
    "dr_grpo": FixedLength,
    "dapo": TokenMean,
    "luspo": SequenceMeanTokenSum,
}
"""TRL's `loss_type`s that are the clip with another average: with a region they choose the average alone."""

_REGIONS_OF_THEIR_OWN = {"cispo": ("dapo", "cispo"), "sapo": ("grpo", "sapo"), "vespo": ("dapo", None)}
_HARMLESS_GENERATION_KEYS = {
    "seed", "n", "max_tokens", "max_new_tokens", "max_length", "stop", "stop_token_ids",
    "stop_strings", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "detokenize", "use_cache", "cache_implementation", "pad_token_id", "bos_token_id", "eos_token_id",
}  # fmt: skip


def check_settings(args: Any, region: Region, needs: Needs, behavior: Behavior) -> None:
    """Refuses what would bypass the region, count the mismatch twice, or make a ratio of two different things.

    Raises:
        ConfigError: with the setting and what to do.
    """
    one_of("behavior", behavior, ("sampler", "trainer"))
    _check_loss(args, needs)
    _check_terms(args)
    _check_anchors(args, region, needs, behavior)
    _check_sampling(args)


def _check_loss(args: Any, needs: Needs) -> None:
    kind = args.loss_type
    if kind in _REGIONS_OF_THEIR_OWN:
        average, preset = _REGIONS_OF_THEIR_OWN[kind]
        instead = f" and region=trustrl.preset({preset!r})" if preset else "; trustrl has no such region"
        refuse("loss_type", "an average", kind, f"{kind} is a region of its own: use loss_type={average!r}{instead}.")
    if kind not in REDUCTIONS:
        refuse("loss_type", f"one of {', '.join(REDUCTIONS)}", kind, "With a region it chooses the average alone.")
    if needs.reduction is not None and REDUCTIONS[kind] is not needs.reduction:
        fitting = [name for name, reduction in REDUCTIONS.items() if reduction is needs.reduction]
        refuse("loss_type", " or ".join(map(repr, fitting)), kind, "This region is defined per sequence.")
    if args.importance_sampling_level != "token":
        refuse(
            "importance_sampling_level", "'token'", args.importance_sampling_level,
            "The region says at which level it decides: trustrl.preset('gspo') is the sequence's.",
        )  # fmt: skip
    for name, default in (("epsilon", 0.2), ("epsilon_high", None), ("delta", None)):
        value = getattr(args, name, default)
        if value != default:
            refuse(
                name, f"left at {default!r}", value,
                "The bound belongs to the region, as in trustrl.PPO(trustrl.Ratio(max_decrease=.2, max_increase=.28)).",
            )  # fmt: skip


def _check_terms(args: Any) -> None:
    if args.top_entropy_quantile < 1.0:
        refuse(
            "top_entropy_quantile", "1.0", args.top_entropy_quantile, "A region over part of the tokens is not built."
        )
    if args.off_policy_mask_threshold is not None:
        refuse(
            "off_policy_mask_threshold", "None", args.off_policy_mask_threshold,
            "It is a second region; trustrl.preset('trm') drops whole sequences by divergence.",
        )  # fmt: skip
    for name in ("use_liger_kernel", "use_liger_loss"):
        if getattr(args, name, False):
            refuse(name, "False", True, "Liger replaces the model's forward or its loss, and the region would not act.")


def _check_anchors(args: Any, region: Region, needs: Needs, behavior: Behavior) -> None:
    if args.use_vllm:
        if behavior == "trainer":
            refuse(
                "behavior", "'sampler' where vLLM samples", behavior,
                "vLLM's own log-probs are recorded; for the trainer's choose the region's anchor='proximal'.",
            )  # fmt: skip
        if "behavior" in needs.anchors and args.vllm_importance_sampling_correction:
            refuse(
                "vllm_importance_sampling_correction", "False", True,
                "This region already contains π'/μ, TRL would multiply with it once more. "
                "(A region with anchor='proximal' may keep TRL's correction.)",
            )  # fmt: skip
    elif "behavior" in needs.anchors and behavior == "sampler":
        refuse(
            "behavior", "'trainer' where transformers generates", behavior,
            f"It records no log-probs, and {region.kind} is anchored on them. behavior='trainer' says that the trainer "
            "is the sampler and records them with one more forward pass; use_vllm=True records vLLM's own.",
        )  # fmt: skip
    if needs.full and needs.projects:
        refuse(
            "region",
            "on a top-K support",
            region,
            "A projection of the whole vocabulary needs its logits: use support='topk'.",
        )
    if needs.full and needs.anchor == "behavior" and behavior == "sampler":
        refuse(
            "region", "a Top-K or Binary one", region,
            "Nobody records the sampler's whole distribution; anchor='proximal' can be exact.",
        )  # fmt: skip


def _check_sampling(args: Any) -> None:
    if args.top_p is not None and args.top_p < 1.0:
        refuse("top_p", "1.0", args.top_p, TRUNCATED)
    if args.top_k:
        refuse("top_k", "0", args.top_k, TRUNCATED)
    if args.min_p:
        refuse("min_p", "None", args.min_p, TRUNCATED)
    if args.repetition_penalty != 1.0:
        refuse("repetition_penalty", "1.0", args.repetition_penalty, PENALISED)
    if getattr(args, "vllm_structured_outputs_regex", None) is not None:
        refuse("vllm_structured_outputs_regex", "None", args.vllm_structured_outputs_regex, TRUNCATED)
    given = args.generation_kwargs if isinstance(args.generation_kwargs, Mapping) else {}
    for key in given:
        if key not in _HARMLESS_GENERATION_KEYS:
            refuse(
                f"generation_kwargs[{key!r}]", "left out", given[key],
                "It may change what tokens are drawn from without the trainer knowing. (The temperature has a setting "
                "of its own.)",
            )  # fmt: skip

"""Which of SkyRL's settings go with a region, and a sentence for each that does not."""

from typing import Any

from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import off_policy_correction_enabled
from skyrl.train.config import AlgorithmConfig

from trustrl.config.axes import Region
from trustrl.config.terms import FixedLength, SequenceMeanTokenMean, TokenMean
from trustrl.engines.naming import more_than_sampled_tokens
from trustrl.engines.settings import PENALISED, TRUNCATED, refuse
from trustrl.engines.skyrl.region import region_of

ALGORITHM, SAMPLING = "trainer.algorithm", "generator.sampling_params"
ENGINE = "generator.inference_engine.engine_init_kwargs"
REDUCTIONS = {
    "token_mean": TokenMean,
    "sequence_mean": SequenceMeanTokenMean,
    "seq_mean_token_sum_norm": FixedLength,
}
"""SkyRL's `loss_reduction`s by the reduction they amount to; its trainer divides the advantages accordingly."""

_THEIRS = ("eps_clip_low", "eps_clip_high", "clip_ratio_c", "sapo", "cispo", "dppo", "clip_cov", "kl_cov")


def check_settings(config: Any) -> Region:
    """Refuses what would bypass the region, count the mismatch twice, or make a ratio of two different things.

    Args:
        config: SkyRL's whole configuration, a `SkyRLTrainConfig`.

    Returns:
        The region that the run will use.

    Raises:
        ConfigError: with the setting and what to do.
    """
    algorithm = config.trainer.algorithm
    region = region_of(algorithm.policy_loss_type, algorithm)
    check_algorithm(algorithm, region)
    anchors = region.needs().anchors
    if "behavior" in anchors:
        _check_behavior(config)
    if "proximal" in anchors and config.trainer.fully_async.enabled:
        refuse(
            "trainer.fully_async.enabled", "False", True,
            f"{region.kind} needs the trainer's policy at the rollout's weights, which SkyRL does not keep; a region "
            "with anchor=behavior needs none.",
        )  # fmt: skip
    _check_sampling(config)
    return region


def check_algorithm(algorithm: Any, region: Region) -> None:
    """What can be told from `trainer.algorithm` alone, which is all that a loss is given.

    Raises:
        ConfigError: with the setting and what to do.
    """
    wanted = more_than_sampled_tokens(region)
    if wanted:
        refuse(
            f"{ALGORITHM}.policy_loss_type", "a region of the sampled token", region.kind,
            f"It needs {' and '.join(wanted)} at each position, and SkyRL hands a loss sampled log-probs only. "
            "TRL and verl run it.",
        )  # fmt: skip
    if algorithm.use_tis or off_policy_correction_enabled(algorithm.off_policy_correction):
        refuse(
            f"{ALGORITHM}.off_policy_correction", "off", algorithm.off_policy_correction,
            "SkyRL's own losses apply it themselves, and no other does. A region anchored on the sampler contains π'/μ "
            "already; one with anchor=proximal takes region.correction.",
        )  # fmt: skip
    needs = region.needs()
    if needs.penalty is not None:
        refuse(
            f"{ALGORITHM}.region.{needs.penalty}", "0", getattr(region, needs.penalty),
            "SkyRL divides the advantages by its counts and adds up the losses of tokens, so that a term without an "
            "advantage is a sum beside an average and grows with the batch. TRL and verl run it.",
        )  # fmt: skip
    needed = needs.reduction
    if needed is not None and REDUCTIONS.get(algorithm.loss_reduction) is not needed:
        fitting = [name for name, reduction in REDUCTIONS.items() if reduction is needed]
        refuse(
            f"{ALGORITHM}.loss_reduction", " or ".join(fitting), algorithm.loss_reduction,
            f"{region.kind}'s gradient is defined per sequence.",
        )  # fmt: skip
    untouched = AlgorithmConfig()
    for name in _THEIRS:
        value, default = getattr(algorithm, name), getattr(untouched, name)
        if value != default:
            refuse(
                f"{ALGORITHM}.{name}", f"left at {default}", value,
                f"It belongs to SkyRL's own losses; a region's bounds are in {ALGORITHM}.region.",
            )  # fmt: skip


def _check_behavior(config: Any) -> None:
    sampling = config.generator.sampling_params
    if sampling.logprobs is None:
        refuse(f"{SAMPLING}.logprobs", "1", None, "Without it the sampler records no log-probs.")
    mode = config.generator.inference_engine.engine_init_kwargs.get("logprobs_mode", "raw_logprobs")
    if sampling.temperature != 1.0 and mode != "processed_logprobs":
        refuse(
            f"{ENGINE}.logprobs_mode", "processed_logprobs", mode,
            f"vLLM's raw log-probs are not what was sampled from at temperature {sampling.temperature:g}.",
        )  # fmt: skip


def _check_sampling(config: Any) -> None:
    sampling = config.generator.sampling_params
    trained = config.trainer.algorithm.temperature
    if trained is not None and trained != sampling.temperature:
        refuse(
            f"{ALGORITHM}.temperature", f"{SAMPLING}.temperature ({sampling.temperature:g})", trained,
            "π and μ would be taken at different temperatures.",
        )  # fmt: skip
    if sampling.top_p < 1.0:
        refuse(f"{SAMPLING}.top_p", "1.0", sampling.top_p, TRUNCATED)
    if sampling.top_k > 0:
        refuse(f"{SAMPLING}.top_k", "-1", sampling.top_k, TRUNCATED)
    if sampling.min_p > 0.0:
        refuse(f"{SAMPLING}.min_p", "0.0", sampling.min_p, TRUNCATED)
    if sampling.repetition_penalty != 1.0:
        refuse(f"{SAMPLING}.repetition_penalty", "1.0", sampling.repetition_penalty, PENALISED)

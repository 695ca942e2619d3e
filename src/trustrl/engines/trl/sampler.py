"""vLLM as TRL's sampler: its options, its weight sync, and re-scoring of finished sequences."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trustrl.engines.refusals import rows
from trustrl.engines.refusals.trl import SERVER
from trustrl.engines.trl.anchors import RECORDED, SampledTopK, ScoreWithSampler
from trustrl.errors import EngineError

VLLM_DEFAULT_MAX_LOGPROBS = 20


@contextmanager
def colocated_options(settings: Any, *, top_k: int, given: dict[str, Any] | None) -> Iterator[None]:
    """Makes TRL build a colocated vLLM with the options that the region and this machine need, while active.

    Args:
        settings: TRL's `GRPOConfig`, or None.
        top_k: The number of ids that re-scoring requests; 0 if the region does not re-score.
        given: The user's own options.

    Raises:
        EngineError: If a variable that vLLM reads on a CPU is not set.
    """
    if settings is None or not settings.use_vllm or settings.vllm_mode != "colocate":
        yield
        return
    from trustrl.engines.vllm.options import cpu_options, extra_llm_options, missing_cpu_environment

    missing = missing_cpu_environment()
    if missing:
        prefix = " ".join(f"{name}={value}" for name, value in missing.items())
        raise EngineError(
            f"The environment must set {', '.join(missing)} before vLLM is imported on a CPU, and it does not. "
            f"Start with `{prefix} python ...`."
        )
    options = {**cpu_options(), **(given or {})}
    if top_k > VLLM_DEFAULT_MAX_LOGPROBS:
        options.setdefault("max_logprobs", top_k)
    if not options:
        yield
        return
    with extra_llm_options(**options):
        yield


def prepare(trainer: Any, *, rescoring: bool) -> ScoreWithSampler | None:
    """Makes the trainer's vLLM follow its weights, and returns a function that re-scores with it.

    Args:
        trainer: TRL's trainer.
        rescoring: Whether the region needs the sampler's top-K.

    Returns:
        The function, or None if the region does not re-score or vLLM is not used.

    Raises:
        ConfigError: If the vLLM server's settings do not work with a region.
    """
    if not trainer.use_vllm:
        return None
    from trustrl.engines.vllm.scoring import score_rollout, tempered
    from trustrl.engines.vllm.weight_sync import install_sync

    generation, temperature = trainer.vllm_generation, trainer.temperature
    if generation.mode == "colocate":
        install_sync(generation)
    elif trainer.accelerator.is_main_process and temperature != 1.0:
        mode = generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
        facts = {"The vLLM server's logprobs_mode": mode, "temperature": temperature}
        rows.check(SERVER, rows.reader(facts), trainer.region)
    if not rescoring:
        return None

    def score(rollout: dict[str, Any], k: int) -> SampledTopK:
        prompts = _unpadded(rollout["prompt_ids"], rollout["prompt_mask"])
        completions = _unpadded(rollout["completion_ids"], rollout["completion_mask"])
        # A row may be empty (truncated completions can be masked out); every rank must still make the request.
        asked = [i for i, completion in enumerate(completions) if completion]
        scores = score_rollout(
            generation, [prompts[i] + completions[i] for i in asked], [len(prompts[i]) for i in asked], k
        )
        length = scores.logp.shape[1]
        if temperature != 1.0:
            recorded = rollout[RECORDED][asked, :length].to(scores.logp.device)
            scores = tempered(scores, recorded, temperature)
        like = rollout["completion_ids"]
        ids = torch.full((*like.shape, k), -1, dtype=torch.int64, device=like.device)
        logp = torch.full(ids.shape, -torch.inf, dtype=torch.float32, device=like.device)
        ids[asked, :length] = scores.top_ids.to(like.device)
        logp[asked, :length] = scores.top_logp.to(like.device, torch.float32)
        return SampledTopK(ids, logp)

    return score


def _unpadded(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[on].tolist() for row, on in zip(ids.cpu(), mask.bool().cpu(), strict=True)]

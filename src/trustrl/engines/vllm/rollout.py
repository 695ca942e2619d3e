"""Re-scoring inside TRL's trainers: every rank asks about its own sequences, and the right ranks ask vLLM."""

from importlib import import_module
from typing import Any

import torch

from trustrl.engines.vllm.scoring import Scores, score, score_on_server
from trustrl.errors import ConfigError


def score_rollout(generation: Any, sequences: list[list[int]], prompt_lengths: list[int], k: int) -> Scores:
    """`score` with the sampler of TRL's `VLLMGeneration`, in either mode; to be called on every rank.

    Raises:
        ConfigError: sleep mode is on, or what `score` refuses.
    """
    if generation.mode == "server":
        return _by_the_main_process(generation, sequences, prompt_lengths, k)
    if generation.enable_sleep_mode:
        raise ConfigError(
            "vllm_enable_sleep_mode must be False to score with the sampler, got True. "
            "A sleeping sampler has thrown its weights away when the rollout is over."
        )
    if generation.tensor_parallel_size == 1:
        return score(generation.llm, sequences, prompt_lengths, k)
    # All ranks of a tensor-parallel group run the engine together, so all must ask for all of the group's sequences.
    parts: list[Any] = [None] * generation.tensor_parallel_size
    torch.distributed.all_gather_object(parts, (sequences, prompt_lengths), group=generation.tp_group)
    scores = score(generation.llm, *_joined(parts), k)
    return scores.rows(_part(parts, torch.distributed.get_rank(group=generation.tp_group)))


def _by_the_main_process(generation: Any, sequences: list[list[int]], prompt_lengths: list[int], k: int) -> Scores:
    """Only the main process has a client."""
    utils = import_module("accelerate.utils")
    parts = utils.gather_object([(sequences, prompt_lengths)])
    answer: list[Any] = [None]
    if generation.accelerator.is_main_process:
        answer = [score_on_server(generation.vllm_client, *_joined(parts), k)]
    utils.broadcast_object_list(answer, from_process=0)
    return answer[0].rows(_part(parts, generation.accelerator.process_index))


def _joined(parts: list[Any]) -> tuple[list[list[int]], list[int]]:
    return [s for sequences, _ in parts for s in sequences], [p for _, lengths in parts for p in lengths]


def _part(parts: list[Any], rank: int) -> slice:
    start = sum(len(sequences) for sequences, _ in parts[:rank])
    return slice(start, start + len(parts[rank][0]))

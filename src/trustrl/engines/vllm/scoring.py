"""The sampler's log-probs of finished sequences, for checks: at the sampled token, and at its K most probable ids.

They are not μ: a prefill rounds differently from decoding (see `trustrl.engines.trl.sampler`). `decode_record`
records μ. vLLM returns them as `prompt_logprobs`, from one prefill of the whole sequence. They are raw, that is before
temperature and truncation, regardless of the engine's `logprobs_mode` and the request's temperature (prompt tokens do
not pass a sampling step). A request for them never reads the prefix cache, so no position is missing.
"""

from array import array
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.config.validators import whole
from trustrl.errors import ConfigError, EngineError, RecordError


@dataclass(frozen=True, slots=True)
class Scores:
    """The sampler's log-probs of B completions, each padded on the right to the longest."""

    logp: Float[Tensor, "b t"]
    """Log-prob of the token at each position; 0 on padding."""

    top_ids: Int[Tensor, "b t k"]
    """The K most probable ids, most probable first; −1 on padding. The token itself may or may not be among them."""

    top_logp: Float[Tensor, "b t k"]
    """Their log-probs; −inf on padding."""

    valid: Bool[Tensor, "b t"]
    """True on the completion's tokens."""

    def rows(self, wanted: slice) -> "Scores":
        """Returns some of the sequences, padded to the longest of these."""
        longest = int(self.valid[wanted].sum(-1).max()) if self.valid[wanted].numel() else 0
        fields = (self.logp, self.top_ids, self.top_logp, self.valid)
        return Scores(*(x[wanted, :longest] for x in fields))


def score(llm: Any, sequences: list[list[int]], prompt_lengths: list[int], k: int) -> Scores:
    """Returns log-probs of finished sequences under the engine's current weights.

    With tensor parallelism, every rank of a group must request the same sequences; see `score_rollout`.

    Args:
        llm: vLLM's `LLM`.
        sequences: The ids of each prompt and completion, as one list per sequence.
        prompt_lengths: The number of prompt ids in each sequence. The ids after the prompt are scored.
        k: The number of most probable ids to return at each position; 0 for none.

    Raises:
        ConfigError: If the engine was not built for this K or these lengths; names the engine's setting.
        RecordError: If the sequences and the prompt lengths do not match.
    """
    _check_sequences(sequences, prompt_lengths)
    _check_engine(llm, sequences, k)
    # vLLM must sample one more token, which is discarded. It is chosen greedily: a drawn token would advance the random
    # stream that the next rollout (and, in one process, the trainer) draws from. Flat log-probs are lists of numbers;
    # otherwise vLLM creates one Python object per log-prob.
    parameters = import_module("vllm").SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=k, flat_logprobs=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": sequence} for sequence in sequences]
    outputs = llm.generate(prompts, sampling_params=parameters, use_tqdm=False)
    return _padded([_table(output.prompt_logprobs, p, k) for output, p in zip(outputs, prompt_lengths, strict=True)], k)


def score_on_server(client: Any, sequences: list[list[int]], prompt_lengths: list[int], k: int) -> Scores:
    """Returns the result of `score`, computed by a vLLM server through TRL's `VLLMClient`.

    Args:
        client: TRL's `VLLMClient`; only its `get_sequence_logprobs` is used.
        sequences: As for `score`.
        prompt_lengths: As for `score`.
        k: As for `score`.

    Raises:
        ConfigError: If the server was not started for this K.
        RecordError: If the sequences and the prompt lengths do not match.
    """
    _check_sequences(sequences, prompt_lengths)
    whole("k", k, low=0)
    if not sequences:
        return _padded([], k)
    try:
        answer = client.get_sequence_logprobs(sequences, prompt_lengths, top_logprobs=k)
    except Exception as error:
        if "greater than max allowed" in str(error):
            raise ConfigError(
                f"k must be at most the server's max_logprobs, got {k}. Start the server with --max-logprobs {k}."
            ) from error
        raise
    tables = []
    for own, ids, logp in zip(answer["actual_logprobs"], answer["logprob_token_ids"], answer["logprobs"], strict=True):
        own_T1 = torch.tensor(own, dtype=torch.float32).view(len(own), 1)
        logp_TK = torch.tensor(logp, dtype=torch.float32).view(len(own), k)
        ids_TK = torch.tensor(ids, dtype=torch.int64).view(len(own), k)
        ids_TK = ids_TK.masked_fill(logp_TK == -torch.inf, -1)  # the client pads with id 0
        tables.append((ids_TK, torch.cat([own_T1, logp_TK], -1)))
    return _padded(tables, k)


def score_rollout(generation: Any, sequences: list[list[int]], prompt_lengths: list[int], k: int) -> Scores:
    """Returns the result of `score` for the sampler of TRL's `VLLMGeneration`, in either mode. Call it on every rank.

    Raises:
        ConfigError: If sleep mode is on, or if `score` raises it.
    """
    if generation.mode == "server":
        return _by_the_main_process(generation, sequences, prompt_lengths, k)
    if generation.enable_sleep_mode:
        raise ConfigError(
            "vllm_enable_sleep_mode must be False to score with the sampler, got True. "
            "A sleeping sampler discards its weights after the rollout."
        )
    if generation.tensor_parallel_size == 1:
        return score(generation.llm, sequences, prompt_lengths, k)
    # All ranks of a tensor-parallel group run the engine together, so each must request all of the group's sequences.
    parts: list[Any] = [None] * generation.tensor_parallel_size
    torch.distributed.all_gather_object(parts, (sequences, prompt_lengths), group=generation.tp_group)
    scores = score(generation.llm, *_joined(parts), k)
    return scores.rows(_part(parts, torch.distributed.get_rank(group=generation.tp_group)))


def _check_sequences(sequences: list[list[int]], prompt_lengths: list[int]) -> None:
    if len(sequences) != len(prompt_lengths):
        raise RecordError(
            f"prompt_lengths must have one entry per sequence, got {len(prompt_lengths)} for {len(sequences)}. "
            "Pass the number of prompt ids of each sequence."
        )
    for row, (sequence, length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        if not 1 <= length <= len(sequence):
            raise RecordError(
                f"prompt_lengths[{row}] must be between 1 and the sequence's {len(sequence)} ids, got {length}. "
                "Nothing predicts the first id of a sequence, so a prompt needs at least one id."
            )


def _check_engine(llm: Any, sequences: list[list[int]], k: int) -> None:
    """Raises for requests that vLLM would refuse in the middle of a batch, or answer incorrectly."""
    whole("k", k, low=0)
    config = llm.model_config
    if config.logprobs_mode.endswith("logits"):
        raise ConfigError(
            f"logprobs_mode must be 'raw_logprobs' or 'processed_logprobs', got {config.logprobs_mode!r}. "
            "Otherwise the scores would be logits."
        )
    vocabulary = config.get_vocab_size()
    limit = vocabulary if config.max_logprobs == -1 else config.max_logprobs
    if k > min(limit, vocabulary):
        advice = (
            "The vocabulary does not have more ids."
            if limit >= vocabulary
            else f"Build the engine with max_logprobs={k}: extra_llm_options(max_logprobs={k}) around TRL's trainer."
        )
        raise ConfigError(f"k must be at most {min(limit, vocabulary)}, got {k}. {advice}")
    longest = max(map(len, sequences), default=0)
    if longest >= config.max_model_len:
        raise ConfigError(
            f"max_model_len must be at least {longest + 1} to score a sequence of {longest} tokens (vLLM samples one "
            f"more), got {config.max_model_len}. Build the engine with a larger value; TRL's setting is "
            "vllm_max_model_length."
        )


def _table(flat: Any, prompt_length: int, k: int) -> tuple[Tensor, Tensor]:
    """Returns (T, K) ids and (T, 1 + K) log-probs, the token's own first, of one sequence's completion."""
    width = k + 1  # the token's own log-prob comes before the K most probable, even if it is one of them
    positions = len(flat) - 1  # the first token has none
    if len(flat.logprobs) != positions * width:
        raise EngineError(
            f"vLLM must return {width} log-probs at each of {positions} positions, got {len(flat.logprobs)} in total. "
            "Install a vllm version listed in trustrl's documentation."
        )
    skip = (prompt_length - 1) * width
    ids = _tensor(flat.token_ids[skip:], "q", torch.int64).view(-1, width)
    return ids[:, 1:], _tensor(flat.logprobs[skip:], "f", torch.float32).view(-1, width)


def _tensor(numbers: list, code: str, dtype: torch.dtype) -> Tensor:
    """Returns `torch.tensor(numbers)`, five times faster. It matters because each token has K + 1 numbers."""
    return torch.frombuffer(array(code, numbers), dtype=dtype) if numbers else torch.empty(0, dtype=dtype)


def _padded(tables: list[tuple[Tensor, Tensor]], k: int) -> Scores:
    size = (len(tables), max((len(ids) for ids, _ in tables), default=0))
    scores = Scores(
        logp=torch.zeros(size),
        top_ids=torch.full((*size, k), -1),
        top_logp=torch.full((*size, k), -torch.inf),
        valid=torch.zeros(size, dtype=torch.bool),
    )
    for row, (ids, logp) in enumerate(tables):
        scores.logp[row, : len(ids)] = logp[:, 0]
        scores.top_ids[row, : len(ids)] = ids
        scores.top_logp[row, : len(ids)] = logp[:, 1:]
        scores.valid[row, : len(ids)] = True
    return scores


def _by_the_main_process(generation: Any, sequences: list[list[int]], prompt_lengths: list[int], k: int) -> Scores:
    """Scores on the main process, the only one with a client, and returns this rank's part."""
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

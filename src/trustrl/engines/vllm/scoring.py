"""The sampler's own log-probs of sequences that are finished: at the sampled token, and at its K most probable ids.

vLLM gives them as `prompt_logprobs`, from one prefill of the whole sequence. They are raw, that is before temperature
and truncation, whatever the engine's `logprobs_mode` and the request's temperature say (prompt tokens pass no sampling
step); `tempered` brings them to the temperature the tokens were drawn at. A request for them never reads the prefix
cache, so no position is missing.
"""

from array import array
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.config.checks import real, whole
from trustrl.errors import ConfigError, EngineError, RecordError


@dataclass(frozen=True, slots=True)
class Scores:
    """What the sampler says about B completions, each padded on the right to the longest."""

    logp: Float[Tensor, "b t"]
    """Log-prob of the token that stands there; 0 on padding."""

    top_ids: Int[Tensor, "b t k"]
    """The K most probable ids, most probable first; −1 on padding. The token itself may be among them or not."""

    top_logp: Float[Tensor, "b t k"]
    """Their log-probs; −inf on padding."""

    valid: Bool[Tensor, "b t"]
    """True on the completion's tokens."""

    def rows(self, wanted: slice) -> "Scores":
        """Some of the sequences, padded to the longest of these."""
        longest = int(self.valid[wanted].sum(-1).max()) if self.valid[wanted].numel() else 0
        fields = (self.logp, self.top_ids, self.top_logp, self.valid)
        return Scores(*(x[wanted, :longest] for x in fields))


def score(llm: Any, sequences: list[list[int]], prompt_lengths: list[int], k: int) -> Scores:
    """Log-probs of finished sequences under the engine's present weights.

    With tensor parallelism every rank of a group must ask for the same sequences: see `score_rollout`.

    Args:
        llm: vLLM's `LLM`.
        sequences: prompt and completion as one list of ids each.
        prompt_lengths: how many of them are the prompt; what follows is scored.
        k: how many most probable ids to return at each position; 0 for none.

    Raises:
        ConfigError: the engine was not built for this K or these lengths; the message names its setting.
        RecordError: sequences and prompt lengths do not fit.
    """
    _check_sequences(sequences, prompt_lengths)
    _check_engine(llm, sequences, k)
    # vLLM must sample one more token. It is thrown away, and taken greedily: a drawn one would move the random stream
    # the next rollout (and, in one process, the trainer) draws from. Flat log-probs are lists of numbers; otherwise
    # vLLM makes one Python object per log-prob.
    parameters = import_module("vllm").SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=k, flat_logprobs=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": sequence} for sequence in sequences]
    outputs = llm.generate(prompts, sampling_params=parameters, use_tqdm=False)
    return _padded([_table(output.prompt_logprobs, p, k) for output, p in zip(outputs, prompt_lengths, strict=True)], k)


def score_on_server(
    client: Any, sequences: list[list[int]], prompt_lengths: list[int], k: int, *, chunk_size: int = 0
) -> Scores:
    """`score` by a vLLM server, through TRL's `VLLMClient`.

    Args:
        client: TRL's `VLLMClient`; only its `get_sequence_logprobs` is used.
        sequences: as for `score`.
        prompt_lengths: as for `score`.
        k: as for `score`.
        chunk_size: sequences per request; 0 sends all in one.

    Raises:
        ConfigError: the server was not started for this K.
        RecordError: sequences and prompt lengths do not fit.
    """
    _check_sequences(sequences, prompt_lengths)
    whole("k", k, low=0)
    if not sequences:
        return _padded([], k)
    try:
        answer = client.get_sequence_logprobs(sequences, prompt_lengths, top_logprobs=k, chunk_size=chunk_size)
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
        ids_TK = ids_TK.masked_fill(logp_TK == -torch.inf, -1)  # the client fills up with id 0
        tables.append((ids_TK, torch.cat([own_T1, logp_TK], -1)))
    return _padded(tables, k)


def tempered(scores: Scores, recorded_logp: Float[Tensor, "b t"], temperature: float) -> Scores:
    r"""The same positions under the distribution the tokens were drawn from, at temperature T.

        log μ_T(k) = (l_k − l_a)/T + log μ_T(a),   l = raw log-probs, a = the sampled token

    The vocabulary's normaliser cancels, so the record of the sampled token is enough; the order of ids is unchanged.
    Holds for temperature alone: after top-p, top-k or min-p the removed ids have no log-prob. Values above 0, possible
    by rounding only, become 0.

    Args:
        scores: raw, from `score`.
        recorded_logp: log μ_T(a) as the sampler recorded it while decoding, with `processed_logprobs`.
        temperature: T.
    """
    real(
        "temperature", temperature, rule="a finite number > 0", low=0.0, high=1e6, advice="Greedy has no distribution."
    )
    if recorded_logp.shape != scores.logp.shape:
        raise RecordError(
            f"recorded_logp must be of shape {tuple(scores.logp.shape)}, got {tuple(recorded_logp.shape)}. "
            "It is the record of the same completions, padded on the right."
        )
    recorded = recorded_logp.to(scores.logp).masked_fill(~scores.valid, 0.0)
    top_logp = (scores.top_logp - scores.logp[..., None]) / temperature + recorded[..., None]
    return replace(scores, logp=recorded, top_logp=top_logp.clamp(max=0.0))


def _check_sequences(sequences: list[list[int]], prompt_lengths: list[int]) -> None:
    if len(sequences) != len(prompt_lengths):
        raise RecordError(
            f"prompt_lengths must have one entry per sequence, got {len(prompt_lengths)} for {len(sequences)}. "
            "Pass the number of prompt ids of each."
        )
    for row, (sequence, length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        if not 1 <= length <= len(sequence):
            raise RecordError(
                f"prompt_lengths[{row}] must be between 1 and the sequence's {len(sequence)} ids, got {length}. "
                "The first id of all is predicted by nothing, so a prompt has at least one."
            )


def _check_engine(llm: Any, sequences: list[list[int]], k: int) -> None:
    """Refuses in a sentence what vLLM would refuse in the middle of a batch, or answer with something else."""
    whole("k", k, low=0)
    config = llm.model_config
    if config.logprobs_mode.endswith("logits"):
        raise ConfigError(
            f"logprobs_mode must be 'raw_logprobs' or 'processed_logprobs', got {config.logprobs_mode!r}. "
            "Scores would be logits."
        )
    vocabulary = config.get_vocab_size()
    limit = vocabulary if config.max_logprobs == -1 else config.max_logprobs
    if k > min(limit, vocabulary):
        advice = (
            "There are no more ids."
            if limit >= vocabulary
            else f"Build the engine with max_logprobs={k}: extra_llm_options(max_logprobs={k}) around TRL's trainer."
        )
        raise ConfigError(f"k must be at most {min(limit, vocabulary)}, got {k}. {advice}")
    longest = max(map(len, sequences), default=0)
    if longest >= config.max_model_len:
        raise ConfigError(
            f"max_model_len must be at least {longest + 1} to score a sequence of {longest} tokens (vLLM samples one "
            f"more), got {config.max_model_len}. Build the engine with more; TRL calls it vllm_max_model_length."
        )


def _table(flat: Any, prompt_length: int, k: int) -> tuple[Tensor, Tensor]:
    """(T, K) ids and (T, 1 + K) log-probs, the token's own first, of one sequence's completion."""
    width = k + 1  # vLLM puts the token's own log-prob before the K most probable, whether or not it is one of them
    positions = len(flat) - 1  # the first token of all has none
    if len(flat.logprobs) != positions * width:
        raise EngineError(
            f"vLLM must return {width} log-probs at each of {positions} positions, got {len(flat.logprobs)} in all. "
            "Install a version of vllm that trustrl's documentation lists."
        )
    skip = (prompt_length - 1) * width
    ids = _tensor(flat.token_ids[skip:], "q", torch.int64).view(-1, width)
    return ids[:, 1:], _tensor(flat.logprobs[skip:], "f", torch.float32).view(-1, width)


def _tensor(numbers: list, code: str, dtype: torch.dtype) -> Tensor:
    """`torch.tensor(numbers)` at a fifth of its price: there are K + 1 numbers per token."""
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

"""What verl asks of a sampler, and the answer it gets; readable in an environment without verl."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trustrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it."""

    prompt_ids: list[int]

    max_tokens: int

    temperature: float = 1.0
    """0 takes the most probable token."""

    prompt_logprobs: int | None = None
    """A request to score instead: K most probable ids at each position of the prompt, 0 for its own tokens alone."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """What else verl's `sampling_params` say, for a sampler that knows more than temperature."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Lengths the sampler was started for."""

    prompt: int
    response: int
    total: int


def request_of(prompt_ids: list[int], sampling_params: Mapping[str, Any], limits: Limits) -> Request:
    """verl's call as a request.

    Raises:
        ConfigError: the prompt leaves no room, or more than one token is asked for beside scores.
    """
    ids, options = list(prompt_ids), dict(sampling_params)
    options.pop("logprobs", None)  # every answer has them
    temperature = options.pop("temperature", None)
    temperature = 1.0 if temperature is None else float(temperature)
    asked = options.pop("max_tokens", options.pop("max_new_tokens", None))
    scored = options.pop("prompt_logprobs", None)
    if scored is not None:
        if asked != 1:
            raise ConfigError(
                f"max_tokens must be 1 with prompt_logprobs, got {asked}. Score a finished sequence, or sample one."
            )
        if not 1 <= len(ids) <= limits.total:
            raise ConfigError(
                f"A sequence to score must have 1 to {limits.total} tokens, got {len(ids)}. Raise "
                "actor_rollout_ref.rollout.max_model_len."
            )
        return Request(ids, 1, temperature, int(scored), options)
    room = limits.total - len(ids)
    if room < 1:
        raise ConfigError(
            f"A prompt must have fewer than {limits.total} tokens, got {len(ids)}. Raise data.max_prompt_length or "
            "actor_rollout_ref.rollout.max_model_len."
        )
    if asked is None:
        asked = min(limits.response, limits.prompt + limits.response - len(ids))
    return Request(ids, max(1, min(int(asked), room)), temperature, None, options)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. Where verl unpacks it, it is verl's own `TokenOutput`; a sampler needs no verl to make it."""

    token_ids: list[int] = field(default_factory=list)

    log_probs: list[float] = field(default_factory=list)
    """Of the distribution the tokens were drawn from."""

    extra_fields: dict[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return token_output, (self.token_ids, self.log_probs, self.extra_fields)


def token_output(token_ids: list[int], log_probs: list[float], extra_fields: dict[str, Any]) -> Any:
    """verl's `TokenOutput`."""
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput(
        token_ids=token_ids, log_probs=log_probs, stop_reason="completed", extra_fields=dict(extra_fields)
    )


def scores(ids: list[list[int]], logps: list[list[float]], k: int) -> Answer:
    """An answer with verl's `prompt_logprobs`: row j predicts token j+1, and the last row, which predicts none, is 0.

    No token is sampled: scoring does not move the random stream the next rollout draws from.
    """
    width = max(k, 1)
    return Answer(extra_fields={"prompt_ids": [*ids, [0] * width], "prompt_logprobs": [*logps, [0.0] * width]})

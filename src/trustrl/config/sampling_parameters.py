"""Definitions of truncated sampling and of the kind of recorded log-probs, shared by engines, records and tools.

Names are vLLM's, which verl, TRL and SkyRL also use. A parameter that is absent or None has no effect.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

TRUNCATION: Mapping[str, Callable[[float], bool]] = {
    "top_p": lambda value: value < 1.0,
    "top_k": lambda value: value > 0,
    "min_p": lambda value: value > 0.0,
}
"""The parameters that leave a part of the vocabulary to draw from, each with the test for values that do."""

NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
"""The other parameters that change the distribution, with the values that do not."""

PROCESSED = "processed_logprobs"
"""The one `logprobs_mode` of vLLM that returns the log-probs of the distribution that tokens are drawn from."""


def truncating(value_of: Callable[[str], Any]) -> dict[str, float]:
    """Returns the parameters that truncate, with their values.

    Args:
        value_of: Returns the value of a parameter by name, or None.

    Example:
        >>> truncating({"top_p": 1.0, "top_k": -1, "min_p": 0.1}.get)
        {'min_p': 0.1}
    """
    values = {name: value_of(name) for name in TRUNCATION}
    return {name: value for name, value in values.items() if value is not None and TRUNCATION[name](value)}


def is_truncated(value_of: Callable[[str], Any]) -> bool:
    """Returns whether tokens are drawn from a part of the vocabulary. `value_of` is as in `truncating`."""
    return bool(truncating(value_of))


def shaping(value_of: Callable[[str], Any]) -> dict[str, float]:
    """Returns temperature and penalties that differ from their neutral values. `value_of` is as in `truncating`."""
    values = {name: value_of(name) for name in NEUTRAL}
    return {name: value for name, value in values.items() if value is not None and value != NEUTRAL[name]}


def logprobs_kind(mode: str) -> Literal["raw", "processed"]:
    """Returns the kind of log-probs that a `logprobs_mode` of vLLM returns, as `Sampling.logprobs` names it."""
    return "processed" if mode == PROCESSED else "raw"


def describes_the_draw(kind: Literal["raw", "processed"], *, temperature: float, truncated: bool) -> bool:
    """Returns whether log-probs of this kind are those of the distribution that tokens are drawn from."""
    return kind == "processed" or (temperature == 1.0 and not truncated)

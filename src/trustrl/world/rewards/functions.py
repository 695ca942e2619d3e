"""Reward functions by name. Each takes a completion and the answer, and returns a score in [0, 1]."""

import logging
import re
from collections.abc import Callable

from trustrl.optional_imports import need

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = "\\boxed{"


def final_answer(text: str) -> str:
    r"""Returns the answer in a text: in the last `\boxed{}`, in the last `<answer>` tags, or after the last `####`.

    A text without any of these is its own answer.

    Example:
        >>> final_answer("so 2 + 2 = 4.\n#### 4"), final_answer(r"thus \boxed{\frac{1}{2}}."), final_answer(" 4 ")
        ('4', '\\frac{1}{2}', '4')
    """
    if (boxed := _last_boxed(text)) is not None:
        return boxed.strip()
    if tagged := _TAGGED.findall(text):
        return tagged[-1].strip()
    return text.rpartition("####")[2].strip()


def _last_boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    for end in range(start + len(_BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start + len(_BOXED) : end]
    return None  # truncated within the braces


def exact(completion: str, answer: str) -> float:
    """Returns 1 if the final answers of completion and answer are the same text, else 0.

    Example:
        >>> exact("7 + 65 = 72 #### 72", "72"), exact("72.", "72")
        (1.0, 0.0)
    """
    return float(final_answer(completion) == final_answer(answer))


def math_verify(completion: str, answer: str) -> float:
    r"""Returns 1 if math-verify finds the completion's answer equal to the final answer of `answer`, else 0.

    Raises:
        MissingPackageError: If math-verify is not installed.
        ValueError: If math-verify cannot read the answer of the data.
    """
    package = need("math_verify", extra="math")
    # The process that runs this function has a separate time limit, which also ends code that ignores alarms.
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has none
    gold = package.parse(f"\\boxed{{{final_answer(answer)}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the answer {answer!r:.200}")
    return float(package.verify(gold, package.parse(completion, parsing_timeout=None), timeout_seconds=None))


FUNCTIONS: dict[str, Callable[..., float]] = {"exact": exact, "math-verify": math_verify}
"""The functions that a recipe knows by name."""

"""Additions a model of a million parameters can learn: every number has a fixed width, so every answer has too."""

import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from trustrl.config import checks
from trustrl.tasks.task import MOST_LOOKED_AT, Row, Task, check_split

NUMBER = re.compile(r"(?<![0-9])-?[0-9]+(?:\.[0-9]+)?")
THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")


@dataclass(frozen=True, kw_only=True)
class Arithmetic(Task):
    """Sums of two numbers of `digits` digits, padded with zeros: `07+45=` is answered by `052`.

    Example:
        >>> task = Arithmetic()
        >>> row = task.rows("train", 1)[0]
        >>> row
        {'prompt': '63+11=', 'answer': '074'}
        >>> task.score("074", row), task.score("74", row)
        (1.0, 0.0)
    """

    digits: int = 2
    """Of each number; the answer has one more."""

    held_out: float = 0.1
    """The share of problems kept from training."""

    seed: int = 0
    """Which share it is."""

    def __post_init__(self) -> None:
        checks.whole("digits", self.digits, low=1)
        check_split(self.held_out, self.seed)

    def problems(self, seed: int) -> Iterator[tuple[int, int]]:
        """Pairs of numbers without repetition: all of them, or 100,000 where there are more."""
        numbers, draw = 10**self.digits, random.Random(seed)
        if numbers**2 <= sys.maxsize:
            pairs: Iterable[int] = draw.sample(range(numbers**2), min(numbers**2, MOST_LOOKED_AT))
        else:  # too many for a range; of so many, two draws are never the same
            pairs = (draw.randrange(numbers**2) for _ in range(MOST_LOOKED_AT))
        for pair in pairs:
            yield divmod(pair, numbers)

    def text(self, problem: tuple[int, int]) -> str:
        """The numbers in order of size: a model trained on 7 + 45 has as good as seen 45 + 7."""
        return f"{min(problem)}+{max(problem)}"

    def row(self, problem: tuple[int, int], chat: bool) -> Row:
        """The prompt, and the answer with its leading zeros."""
        a, b = problem
        if chat:
            prompt: Any = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]
        else:
            prompt = f"{a:0{self.digits}d}+{b:0{self.digits}d}="
        return {"prompt": prompt, "answer": f"{a + b:0{self.digits + 1}d}"}

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """1 for the exact answer, else 0; in a chat, for the right value of the last number in the text.

        A chat model may say a few words, write `1,024`, and leave out leading zeros.
        """
        if isinstance(row["prompt"], str):
            return float(completion.strip() == row["answer"])
        numbers = NUMBER.findall(THOUSANDS.sub("", completion))
        return float(bool(numbers) and Decimal(numbers[-1]) == Decimal(row["answer"]))

"""Addition with numbers and answers of fixed width, which a model of a million parameters can learn."""

import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from trustrl.config import validators
from trustrl.world.tasks.task import MOST_LOOKED_AT, Row, Task, check_split

NUMBER = re.compile(r"(?<![0-9])-?[0-9]+(?:\.[0-9]+)?")
THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")


@dataclass(frozen=True, kw_only=True)
class Arithmetic(Task):
    """Sums of two numbers of `digits` digits, padded with zeros: the answer to `07+45=` is `052`.

    Example:
        >>> task = Arithmetic()
        >>> row = task.rows("train", 1)[0]
        >>> row
        {'prompt': '63+11=', 'answer': '074'}
        >>> task.score("074", row), task.score("74", row)
        (1.0, 0.0)
    """

    digits: int = 2
    """Digits of each number. The answer has one more."""

    held_out: float = 0.1
    """Share of problems held out from training."""

    seed: int = 0
    """Seed of the split."""

    def __post_init__(self) -> None:
        validators.whole("digits", self.digits, low=1)
        check_split(self.held_out, self.seed)

    def problems(self, seed: int) -> Iterator[tuple[int, int]]:
        """Yields pairs of numbers without repetition: all of them, or 100,000 if there are more."""
        numbers, draw = 10**self.digits, random.Random(seed)
        if numbers**2 <= sys.maxsize:
            pairs: Iterable[int] = draw.sample(range(numbers**2), min(numbers**2, MOST_LOOKED_AT))
        else:  # too many for a range; repetitions are improbable among so many
            pairs = (draw.randrange(numbers**2) for _ in range(MOST_LOOKED_AT))
        for pair in pairs:
            yield divmod(pair, numbers)

    def text(self, problem: tuple[int, int]) -> str:
        """Returns the numbers in ascending order, because 7 + 45 and 45 + 7 must be on the same side of the split."""
        return f"{min(problem)}+{max(problem)}"

    def row(self, problem: tuple[int, int], chat: bool) -> Row:
        """Returns the prompt, and the answer with leading zeros."""
        a, b = problem
        if chat:
            prompt: Any = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]
        else:
            prompt = f"{a:0{self.digits}d}+{b:0{self.digits}d}="
        return {"prompt": prompt, "answer": f"{a + b:0{self.digits + 1}d}"}

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """Returns 1 for the exact answer, else 0. In a chat, compares the value of the last number in the text.

        A chat model may add words, write `1,024`, and omit leading zeros.
        """
        if isinstance(row["prompt"], str):
            return float(completion.strip() == row["answer"])
        numbers = NUMBER.findall(THOUSANDS.sub("", completion))
        return float(bool(numbers) and Decimal(numbers[-1]) == Decimal(row["answer"]))

"""Base class of tasks: the held-out split, the rows of a dataset, and the reward function for a trainer."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

from trustrl.config import validators
from trustrl.errors import ConfigError, MissingDataError
from trustrl.optional_imports import need
from trustrl.registry import nearest

SPLITS = ("train", "held_out")
Row = dict[str, Any]
"""One problem in plain JSON types: `prompt` (text or chat messages), `answer`, and the columns that scoring needs."""
MOST_LOOKED_AT = 100_000


class Task(ABC):
    """Problems whose answers Python can score, some of them held out from training.

    A hash of a problem's text decides the split. The order, the number and the seed of a draw do not affect it, so all
    runs, machines and draws agree on the held-out problems.

    A new task implements `problems`, `text`, `row` and `score`. Register it with `trustrl.world.tasks.TASKS.register`.
    """

    held_out: float
    """Share of problems held out from training."""

    seed: int
    """Seed of the split. Draws have a separate seed."""

    columns: ClassVar[tuple[str, ...]] = ("answer",)
    """Columns that `score` reads in addition to the prompt."""

    looked_at: ClassVar[int | None] = MOST_LOOKED_AT
    """Number of problems that one call of `rows` examines before it raises. None examines all of them."""

    endless: ClassVar[bool] = False
    """True if problems are generated on demand without end, so that a count is required."""

    def check(self) -> None:
        """Raises if data of the task are missing. Most tasks check their settings when created."""
        return

    def start(self) -> None:
        """Raises if code of the task cannot be loaded, before a model is."""
        return

    @abstractmethod
    def problems(self, seed: int) -> Iterator[Any]:
        """Yields problems of both splits, in an order that `seed` determines."""

    @abstractmethod
    def text(self, problem: Any) -> str:
        """Returns a text that identifies the problem. Problems with equal texts are on the same side of the split."""

    @abstractmethod
    def row(self, problem: Any, chat: bool) -> Row:
        """Returns the problem as a row. Its prompt is a text or, with `chat`, a list of messages."""

    @abstractmethod
    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """Returns the reward, in [0, 1], of one completion of the prompt in `row`."""

    def rows(self, split: str, count: int | None = None, seed: int = 0, chat: bool = False) -> list[Row]:
        """Returns `count` problems of one split, or all of them, in an order that `seed` determines."""
        validators.one_of("split", split, SPLITS)
        if count is not None:
            validators.whole("count", count, low=1)
        elif self.endless:
            raise ConfigError(
                f"count must be a whole number ≥ 1, got None. {type(self).__name__} generates problems without end."
            )
        looked_at = islice(self.problems(seed), self.looked_at)
        kept = (problem for problem in looked_at if self.is_held_out(problem) == (split == "held_out"))
        rows = [self.row(problem, chat) for problem in islice(kept, count)]
        if count is not None and len(rows) < count:
            raise ConfigError(
                f"count must be at most {len(rows)}, the number of problems in {split!r}, got {count}. "
                "Ask for fewer, change held_out, or choose settings with more problems."
            )
        return rows

    def is_held_out(self, problem: Any) -> bool:
        """Returns True if the problem is held out from training."""
        return self.in_share(problem, self.held_out)

    def in_share(self, problem: Any, share: float) -> bool:
        """Returns True for this share of all problems, which the hash of a problem's text decides."""
        digest = hashlib.sha256(f"{self.seed}:{self.text(problem)}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < share * 2**64

    def dataset(self, split: str, count: int | None = None, seed: int = 0, chat: bool = False) -> Any:
        """Returns the rows as a `datasets.Dataset`."""
        return need("datasets", extra="tasks").Dataset.from_list(self.rows(split, count, seed, chat))

    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Returns one score per completion. Has the signature of TRL's reward functions: each dataset column is a list.

        Completions are texts or lists of messages, of which the last one is scored. Ignores other arguments of the
        trainer, such as token ids or its state.
        """
        for name in self.columns:
            if name not in columns:
                raise MissingDataError(
                    f"The reward of {type(self).__name__} must be given the column {name!r}, got "
                    f"{', '.join(sorted(columns)) or 'none'}. Create the dataset with the task's `dataset` or `rows`."
                )
        rows = [
            {"prompt": prompt, **dict(zip(self.columns, values, strict=True))}
            for prompt, *values in zip(prompts, *(columns[name] for name in self.columns), strict=True)
        ]
        return self.scores(list(map(completion_text, completions)), rows)

    def scores(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """Returns the score of each completion of the prompt in its row."""
        return [self.score(completion, row) for completion, row in zip(completions, rows, strict=True)]


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Returns a completion's text: the completion itself, or the content of its last message."""
    if isinstance(completion, str):
        return completion
    return (completion[-1].get("content") or "") if completion else ""


def check_split(held_out: Any, seed: Any) -> None:
    """Raises if the share would leave one side of the split empty, or if the seed is invalid."""
    if isinstance(held_out, bool) or not isinstance(held_out, (int, float)) or not 0 < held_out < 1:
        raise ConfigError(f"held_out must be a share in (0, 1), got {held_out!r}. 0.1 holds out a tenth.")
    validators.whole("seed", seed, low=0)


def refuse_unknown(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises if a setting is unknown, and suggests the nearest known name."""
    known = list(known)
    for name in names:
        if name not in known:
            raise ConfigError(f"{where} has no setting {name!r}.{nearest(name, known)} It has: {', '.join(known)}.")

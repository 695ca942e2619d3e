"""What every task shares: which problems are held out, rows for a dataset, and the reward a trainer calls."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

from trustrl.config import checks
from trustrl.errors import ConfigError, MissingDataError
from trustrl.packages import need
from trustrl.registry import nearest

SPLITS = ("train", "held_out")
Row = dict[str, Any]
"""One problem in plain JSON types: its `prompt` (text or chat messages), its `answer`, and what scoring needs."""

MOST_LOOKED_AT = 100_000  # problems per call of `rows`: asking for more than there are ends in a sentence


class Task(ABC):
    """Problems whose answers Python can score, some of them held out from training.

    A problem is held out by a hash of its own text. Neither the order, the number nor the seed of a draw moves it to
    the other side, so two runs, two machines and two draws agree on what was never trained on.

    A new task writes `problems`, `text`, `row` and `score`; `trustrl.tasks.TASKS.register(name)` gives it a name.
    """

    held_out: float
    """The share of problems kept from training."""

    seed: int
    """Which share it is. Draws have a seed of their own."""

    columns: ClassVar[tuple[str, ...]] = ("answer",)
    """What `score` reads in a row beside its prompt."""

    endless: ClassVar[bool] = False
    """True where problems are made on demand, so that "all of them" means nothing."""

    @abstractmethod
    def problems(self, seed: int) -> Iterator[Any]:
        """Problems of both splits, in an order that `seed` decides."""

    @abstractmethod
    def text(self, problem: Any) -> str:
        """What makes a problem this problem: two problems with the same text are on the same side of the split."""

    @abstractmethod
    def row(self, problem: Any, chat: bool) -> Row:
        """The problem as a row, its prompt a text or, with `chat`, a list of messages."""

    @abstractmethod
    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """The reward, in [0, 1], of one completion of `row`'s prompt."""

    def rows(self, split: str, count: int | None = None, seed: int = 0, chat: bool = False) -> list[Row]:
        """`count` problems of one split, or all of them, in an order that `seed` decides.

        Raises:
            ConfigError: there is no such split, or it has fewer problems.
        """
        checks.one_of("split", split, SPLITS)
        if count is not None:
            checks.whole("count", count, low=1)
        elif self.endless:
            raise ConfigError(f"count must be a whole number ≥ 1, got None. {type(self).__name__} never runs out.")
        looked_at = islice(self.problems(seed), MOST_LOOKED_AT)
        kept = (problem for problem in looked_at if self.is_held_out(problem) == (split == "held_out"))
        rows = [self.row(problem, chat) for problem in islice(kept, count)]
        if count is not None and len(rows) < count:
            raise ConfigError(
                f"count must be at most {len(rows)}, the problems in {split!r}, got {count}. "
                "Ask for fewer, change held_out, or choose settings with more problems."
            )
        return rows

    def is_held_out(self, problem: Any) -> bool:
        """Whether the problem is kept from training."""
        digest = hashlib.sha256(f"{self.seed}:{self.text(problem)}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.held_out * 2**64

    def dataset(self, split: str, count: int | None = None, seed: int = 0, chat: bool = False) -> Any:
        """The rows as a `datasets.Dataset`."""
        return need("datasets", extra="tasks").Dataset.from_list(self.rows(split, count, seed, chat))

    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """One score per completion, called as TRL calls a reward function: every dataset column a list.

        Completions are texts or lists of messages, of which the last one counts. What else a trainer passes, such as
        token ids or its own state, is ignored.

        Raises:
            MissingDataError: the dataset lacks a column that scoring needs.
        """
        for name in self.columns:
            if name not in columns:
                raise MissingDataError(
                    f"The reward of {type(self).__name__} must be given the column {name!r}, got "
                    f"{', '.join(sorted(columns)) or 'none'}. Make the dataset with the task's own `dataset` or `rows`."
                )
        rows = [
            {"prompt": prompt, **dict(zip(self.columns, values, strict=True))}
            for prompt, *values in zip(prompts, *(columns[name] for name in self.columns), strict=True)
        ]
        return [self.score(completion_text(c), row) for c, row in zip(completions, rows, strict=True)]


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """A completion's text: itself, or the content of the last of its messages."""
    if isinstance(completion, str):
        return completion
    return (completion[-1].get("content") or "") if completion else ""


def check_split(held_out: Any, seed: Any) -> None:
    """Refuses a share that leaves one side empty, and a seed that is none.

    Raises:
        ConfigError: either is out of range.
    """
    if isinstance(held_out, bool) or not isinstance(held_out, (int, float)) or not 0 < held_out < 1:
        raise ConfigError(f"held_out must be a share in (0, 1), got {held_out!r}. 0.1 keeps a tenth from training.")
    checks.whole("seed", seed, low=0)


def refuse_unknown(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuses a setting that is not among the known ones, and suggests the nearest.

    Raises:
        ConfigError: a name in `given` is not in `known`.
    """
    known = list(known)
    for name in given:
        if name not in known:
            raise ConfigError(f"{where} has no setting {name!r}.{nearest(name, known)} It has: {', '.join(known)}.")

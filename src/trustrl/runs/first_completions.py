"""The first completions of a run, kept in memory so that rules and pages share one reading of the files."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

from trustrl.runs.run import Completion, Run, no_completions

MOST_COMPLETIONS = 50_000
"""Maximum completions to read. Later ones are left out."""

KEPT_BYTES = 200_000_000
"""Memory of the completions that are kept. Those after it are read from the files each time."""

_FIELDS, _ENTRY = 1_000, 64
"""Bytes of a completion without its texts, and bounds on an entry of its token ids and log-probs together."""


@dataclass(slots=True)
class FirstCompletions:
    """Yields a run's first completions: from the files at first, then from memory as far as they fit.

    Example:
        >>> from trustrl.runs.run import RunSettings
        >>> run = Run(path="a", name="a", source="", settings=RunSettings(), rows=[],
        ...           completions=lambda: iter([Completion(step=1)]))
        >>> first = FirstCompletions(run)
        >>> list(first()) == list(first()) == [Completion(step=1)]
        True
    """

    run: Run
    kept: list[Completion] | None = field(default=None, init=False)
    """None before the first reading."""

    whole: bool = field(default=False, init=False)
    """True if all of the first completions are kept."""

    def __call__(self) -> Iterator[Completion]:
        """Yields the completions in order of steps."""
        rest: Iterator[Completion] = iter(())
        if self.kept is None:
            rest = islice(self.run.completions(), MOST_COMPLETIONS)
            self._keep(rest)
        elif not self.whole:
            rest = islice(self.run.completions(), len(self.kept), MOST_COMPLETIONS)
        yield from self.kept or ()
        yield from rest

    def _keep(self, source: Iterator[Completion]) -> None:
        """Takes completions from the source until it ends or the memory is used."""
        kept, room = list[Completion](), KEPT_BYTES
        while room > 0 and (completion := next(source, None)) is not None:
            kept.append(completion)
            room -= _size(completion)
        self.kept, self.whole = kept, room > 0


@contextmanager
def read_once(run: Run) -> Iterator[Run]:
    """Context manager that yields the run with its first completions, which are kept in memory until it ends."""
    if run.completions is no_completions:
        yield run
        return
    first = FirstCompletions(run)
    try:
        yield replace(run, completions=first)
    finally:
        first.kept = None


def _size(completion: Completion) -> int:
    """Returns a bound on the memory of a completion in bytes."""
    texts = sum(sys.getsizeof(text) for text in (completion.prompt, completion.text) if text is not None)
    return _FIELDS + texts + _ENTRY * len(completion.token_ids or completion.behavior_logp or ())

"""Completions that a page shows: those in which most went wrong by any measure, whole groups of them, and some others.

Candidates are the completions that the run's reader yields and the sequences in its token records. A completion with a
`sequence` is the one of that id in the records.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from trustrl.optional_imports import need
from trustrl.recording.storage import Place
from trustrl.runs.run import Completion, Run
from trustrl.tools.report.reported_runs import measured_step
from trustrl.tools.report.token_sample import SEED, SequenceScore, TokenSample, decided

MAX_SEQUENCES = 200
"""Maximum completions of one run on a page."""

MAX_CANDIDATES = 200_000
"""Maximum completions to choose from. Later ones are not read."""

MAX_GROUP = 64
TRUNCATED = frozenset({"length", "max_tokens", "max_length", "truncated"})
NUMBERS = (
    "advantage", "behavior_logp", "proximal_logp", "policy_logp", "weight", "divergence_lower", "divergence_upper",
    "entropy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShownCompletion:
    """One completion on the page."""

    completion: Completion
    score: SequenceScore | None
    """Scores from the token records, or None if they lack the completion."""

    columns: Mapping[str, list[Any]] | None
    """Rows of the token records, or None if they lack the completion or do not fit on the page."""


@dataclass(frozen=True, slots=True)
class ShownCompletions:
    """Completions of one run on the page."""

    listed: list[ShownCompletion]
    num_known: int
    """Number of completions to choose from."""


class _Candidate(NamedTuple):
    at: int | None
    """Place among the completions that the reader yields."""

    sequence: int | None
    group: str | None
    reward: float | None
    truncated: bool
    tokens: int
    score: SequenceScore | None


def choose_completions(run: Run, tokens: TokenSample | None, *, max_shown: int) -> ShownCompletions:
    """Chooses completions and reads their texts and token rows.

    Args:
        run: The run.
        tokens: The token records of the run.
        max_shown: Maximum tokens to show with their numbers. No completion is shown in part.

    Raises:
        RecordError: If the records cannot be read.
    """
    candidates = list(_candidates(run.completions(), tokens))
    if not max_shown:
        return ShownCompletions([], len(candidates))
    chosen = _chosen(candidates)
    wanted = {one.at for one in chosen if one.at is not None}
    read = {at: one for at, one in enumerate(run.completions()) if at in wanted} if wanted else {}
    fitting = {one.sequence: one.score for one in _fitting(chosen, max_shown) if one.score is not None}
    rows = dict(_rows(fitting))
    listed, known = [], set()
    for one in chosen:
        columns = rows.get(one.sequence) if one.sequence is not None else None
        if one.group is None and columns is not None:
            text = (one.score and one.score.file, *columns["token_id"])
            if text in known:  # the same completion, sampled twice for one prompt
                continue
            known.add(text)
        found = read.get(one.at) if one.at is not None else None
        if found is not None or columns is not None:
            listed.append(ShownCompletion(found or _from_records(run, one), one.score, columns))
    return ShownCompletions(listed, len(candidates))


def _from_records(run: Run, one: _Candidate) -> Completion:
    score = one.score
    assert score is not None  # a candidate comes from the reader or from the records
    step = measured_step(run, score.step, score.update)
    return Completion(step=step, sequence=one.sequence, advantage=score.advantage, num_tokens=score.tokens)


def _candidates(completions: Iterator[Completion], tokens: TokenSample | None) -> Iterator[_Candidate]:
    scores = dict(tokens.scores) if tokens is not None else {}
    for at, one in enumerate(islice(completions, MAX_CANDIDATES)):
        score = scores.pop(one.sequence, None) if one.sequence is not None else None
        length = one.num_tokens or (score.tokens if score else len(one.text or "") // 4)
        yield _Candidate(at, one.sequence, one.group, one.reward, one.stop_reason in TRUNCATED, length, score)
    for sequence, score in scores.items():
        yield _Candidate(None, sequence, None, None, False, score.tokens, score)


Measure = Callable[[_Candidate], float | tuple[float, ...] | None]
_WORST: tuple[Measure, ...] = (
    lambda one: None if one.score is None else (-one.score.stopped, -one.score.changed),
    lambda one: None if one.score is None or one.score.log_ratio is None else -one.score.log_ratio,
    lambda one: one.reward,
    lambda one: None if one.score is None or one.score.gap is None else -one.score.gap,
    lambda one: -one.tokens,
    lambda one: 0.0 if one.truncated else None,
)
"""Measures of what went wrong, lowest first; None leaves a candidate out."""


def _chosen(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Takes the worst of each measure and a random one in turn, each with its group, up to the limit."""
    groups: dict[str, list[int]] = defaultdict(list)
    for at, one in enumerate(candidates):
        if one.group is not None:
            groups[one.group].append(at)
    lists = [list(range(len(candidates)))]
    random.Random(SEED).shuffle(lists[0])
    for measure in _WORST:
        known = [(found, at) for at, one in enumerate(candidates) if (found := measure(one)) is not None]
        if known:
            lists.append([at for _, at in sorted(known)[: 4 * MAX_SEQUENCES]])
    lists.append(lists.pop(0))  # the random one last
    taken: dict[int, None] = {}
    for turn in range(max(map(len, lists))):
        for order in lists:
            if turn < len(order) and order[turn] not in taken:
                group = candidates[order[turn]].group
                members = [order[turn]] if group is None else groups[group][:MAX_GROUP]
                if len(taken) + len(members) <= MAX_SEQUENCES or not taken:
                    taken |= dict.fromkeys([order[turn], *members])
        if len(taken) >= MAX_SEQUENCES or turn >= 2 * MAX_SEQUENCES:
            break
    return [candidates[at] for at in taken]


def _fitting(chosen: Sequence[_Candidate], max_shown: int) -> Iterator[_Candidate]:
    room = max_shown
    for one in chosen:
        if one.score is not None and one.score.tokens <= room:
            room -= one.score.tokens
            yield one


def _rows(scores: Mapping[int | None, SequenceScore]) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Yields the token rows of sequences at the update of their score."""
    by_file: dict[Place, dict[int | None, int]] = defaultdict(dict)
    for sequence, score in scores.items():
        by_file[score.file][sequence] = score.update
    for file, updates in by_file.items():
        for (sequence, update), columns in _rows_of(file, {one for one in updates if one is not None}):
            if updates[sequence] == update:
                yield sequence, columns


def _rows_of(file: Place, sequences: set[int]) -> Iterator[tuple[tuple[int, int], dict[str, list[Any]]]]:
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    table, _ = decided(file)
    table = table.filter(pc.is_in(table["sequence"], value_set=pa.array(sorted(sequences), pa.int64())))
    table = table.sort_by([("sequence", "ascending"), ("update", "ascending"), ("position", "ascending")])
    columns = {
        name: table[name].to_pylist()
        for name in ("sequence", "update", "step", "position", "token_id", "verdict", *NUMBERS)
    }
    keys = list(zip(columns["sequence"], columns["update"], strict=True))
    start = 0
    for at in range(1, len(keys) + 1):
        if at == len(keys) or keys[at] != keys[start]:
            yield keys[start], {name: values[start:at] for name, values in columns.items()}
            start = at

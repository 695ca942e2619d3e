"""Completions that a page shows: those in which most went wrong by any measure, whole groups of them, and some others.

Candidates are the completions that the run's reader yields and the sequences in its token records. A completion with a
`sequence` is the one of that id in the records.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

from trustrl.optional_imports import need
from trustrl.recording.record_files import FileGone, groups_with, opened
from trustrl.recording.storage import Place
from trustrl.runs.first_completions import MOST_COMPLETIONS
from trustrl.runs.run import Completion, Run
from trustrl.tools.report.reported_runs import measured_step
from trustrl.tools.report.sequence_scores import SequenceScore, SequenceScores
from trustrl.tools.report.token_sample import SEED, Part, TokenSample, decided

MAX_SEQUENCES = 200
"""Maximum completions of one run on a page."""

MOST_TURNS = 2 * MAX_SEQUENCES
"""Maximum completions to consider for each measure."""

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
    step: int
    at: int | None
    """Place among the completions that the reader yields."""

    sequence: int | None
    group: str | None
    reward: float | None
    truncated: bool
    tokens: int
    letters: int
    """Length of the text, by which tokens are estimated."""

    score: SequenceScore | None


def choose_completions(
    run: Run, tokens: TokenSample | None, *, max_shown: int, near: Sequence[int] = ()
) -> ShownCompletions:
    """Chooses completions and reads their texts and token rows.

    Args:
        run: The run.
        tokens: The token records of the run.
        max_shown: Maximum tokens to show with their numbers. No completion is shown in part.
        near: Steps whose completions are shown as well.

    Raises:
        RecordError: If the records cannot be read.
    """
    scores = SequenceScores([]) if tokens is None else tokens.scores
    candidates = _completions(run, scores)
    others = scores.others([candidate.sequence for candidate in candidates if candidate.sequence is not None])
    num_known = len(candidates) + len(others)
    if not max_shown:
        return ShownCompletions([], num_known)
    drawn = random.Random(SEED).sample(range(num_known), min(MOST_TURNS, num_known))
    places = {index - len(candidates) for index in drawn if index >= len(candidates)}
    start, per_step = measured_step(run, 0, 0), measured_step(run, 1, 0) - measured_step(run, 0, 0)
    leading = others.leading(MOST_TURNS, [(step - start) / per_step for step in dict.fromkeys(near)], places)
    moved = {len(candidates) + place: len(candidates) + index for index, place in enumerate(leading)}
    candidates += [_other(run, sequence, score) for sequence, score in leading.values()]
    chosen = _chosen(candidates, [moved.get(index, index) for index in drawn], near)
    wanted = {candidate.at for candidate in chosen if candidate.at is not None}
    until = max(wanted, default=-1) + 1
    read = {index: completion for index, completion in enumerate(islice(run.completions(), until)) if index in wanted}
    fitting: dict[int, SequenceScore] = {}
    for candidate in chosen:
        if candidate.sequence is not None and candidate.score is not None and candidate.score.tokens <= max_shown:
            max_shown -= candidate.score.tokens
            fitting[candidate.sequence] = candidate.score
    rows = dict(_rows(fitting))
    listed, known = [], set()
    for candidate in chosen:
        score = candidate.score
        columns = rows.get(candidate.sequence) if candidate.sequence is not None else None
        if candidate.group is None and columns is not None:
            text = (score and score.file, *columns["token_id"])
            if text in known:  # the same completion, sampled twice for one prompt
                continue
            known.add(text)
        completion = read.get(candidate.at) if candidate.at is not None else None
        if completion is None and columns is not None and score is not None:
            completion = Completion(
                step=measured_step(run, score.step, score.update), sequence=candidate.sequence,
                advantage=score.advantage, num_tokens=score.tokens,
            )  # fmt: skip
        if completion is not None:
            listed.append(ShownCompletion(completion, score, columns))
    return ShownCompletions(listed, num_known)


def _completions(run: Run, scores: SequenceScores) -> list[_Candidate]:
    """Returns the completions of the run's reader, without their texts."""
    candidates = [
        _Candidate(
            completion.step, index, completion.sequence, completion.group, completion.reward,
            completion.stop_reason in TRUNCATED, completion.num_tokens or 0, len(completion.text or ""), None,
        )
        for index, completion in enumerate(islice(run.completions(), MOST_COMPLETIONS))
    ]  # fmt: skip
    known = scores.of([candidate.sequence for candidate in candidates if candidate.sequence is not None])
    for index, candidate in enumerate(candidates):
        score = None if candidate.sequence is None else known.pop(candidate.sequence, None)
        tokens = candidate.tokens or (score.tokens if score else candidate.letters // 4)
        candidates[index] = candidate._replace(tokens=tokens, score=score)
    return candidates


def _other(run: Run, sequence: int, score: SequenceScore) -> _Candidate:
    """Returns a sequence that is in the token records alone."""
    step = measured_step(run, score.step, score.update)
    return _Candidate(step, None, sequence, None, None, False, score.tokens, 0, score)


Measure = Callable[[_Candidate], float | tuple[float, ...] | None]


def _largest(name: str) -> Measure:
    def measure(candidate: _Candidate) -> float | None:
        value = getattr(candidate.score, name, None)
        return None if value is None else -value

    return measure


_WORST: tuple[Measure, ...] = (
    lambda candidate: None if candidate.score is None else (-candidate.score.stopped, -candidate.score.changed),
    _largest("log_ratio"),
    lambda candidate: candidate.reward,
    _largest("gap"),
    lambda candidate: -candidate.tokens,
    lambda candidate: 0.0 if candidate.truncated else None,
)
"""Measures of what went wrong, lowest first; None leaves a candidate out."""


def _nearest(step: int) -> Measure:
    return lambda candidate: abs(candidate.step - step)


def _chosen(candidates: Sequence[_Candidate], drawn: list[int], near: Sequence[int]) -> list[_Candidate]:
    """Takes the worst of each measure, those near each step and a drawn one in turn, up to the limit.

    Each comes with its group.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for index, candidate in enumerate(candidates):
        if candidate.group is not None:
            groups[candidate.group].append(index)
    lists = list[list[int]]()
    for measure in (*_WORST, *map(_nearest, dict.fromkeys(near))):
        known = [
            (value, index) for index, candidate in enumerate(candidates) if (value := measure(candidate)) is not None
        ]
        if known:
            lists.append([index for _, index in sorted(known)[:MOST_TURNS]])
    lists.append(drawn)
    taken: dict[int, None] = {}
    for turn in range(max(map(len, lists))):
        for order in lists:
            if turn < len(order) and order[turn] not in taken:
                group = candidates[order[turn]].group
                members = [order[turn]] if group is None else groups[group][:MAX_GROUP]
                if len(taken) + len(members) <= MAX_SEQUENCES or not taken:
                    taken |= dict.fromkeys([order[turn], *members])
        if len(taken) >= MAX_SEQUENCES:
            break
    return [candidates[index] for index in taken]


def _rows(scores: Mapping[int, SequenceScore]) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Yields the token rows of sequences at the update of their score."""
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    by_file: dict[Place, dict[int, int]] = defaultdict(dict)
    steps: dict[Place, set[int]] = defaultdict(set)
    for sequence, score in scores.items():
        by_file[score.file][sequence] = score.update
        steps[score.file].add(score.step)
    for file, updates in by_file.items():
        try:
            with opened(file) as (parquet, _):
                groups = groups_with(parquet, {"step": sorted(steps[file]), "sequence": sorted(updates)})
            if not groups:  # it was written again since
                continue
            table, _ = next(decided([Part(file, groups)]))
        except FileGone:  # the run still records, and has merged it: its completions have no tokens on the page
            continue
        sequences = pa.array(sorted(updates), pa.int64())
        table = table.filter(pc.is_in(table["sequence"], value_set=sequences))
        table = table.sort_by([("sequence", "ascending"), ("update", "ascending"), ("position", "ascending")])
        names = ("sequence", "update", "step", "position", "token_id", "verdict", *NUMBERS)
        columns = {name: table[name].to_pylist() for name in names}
        keys = zip(columns["sequence"], columns["update"], strict=True)
        start = 0
        for (sequence, update), group in groupby(keys):
            end = start + len(list(group))
            if updates[sequence] == update:
                yield sequence, {name: values[start:end] for name, values in columns.items()}
            start = end

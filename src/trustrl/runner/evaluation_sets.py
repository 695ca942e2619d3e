"""Problems of an evaluation, set by set, and the accuracies of their answers: Avg@n and pass@k."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

from trustrl.runner.evaluation_tables import EvaluationSet
from trustrl.runner.recipe import Recipe
from trustrl.world.tasks import Row, Task

RIGHT = 1.0
"""Smallest score of a right answer, for pass@k."""

WAITING_SECONDS = 60.0
"""Time limit for verl to finish writing its answers, which it does in a thread."""


def pass_at(k: int, right: int, answers: int) -> float:
    """Returns the unbiased estimate of the probability that one of k answers to a problem is right.

        1 − C(n − c, k) / C(n, k),   n answers, c of them right

    Reference: Evaluating Large Language Models Trained on Code, arXiv 2107.03374, eq. 1.

    Example:
        >>> pass_at(1, 2, 8), pass_at(8, 2, 8), round(pass_at(4, 2, 8), 4)
        (0.25, 1.0, 0.7857)
    """
    return 1 - comb(answers - right, k) / comb(answers, k)


def problems_of(recipe: Recipe, task: Task) -> list[tuple[EvaluationSet, list[Row]]]:
    """Returns the sets of an evaluation with their problems. Without blocks, one set has the problems of all sets."""
    evaluation, schedule = recipe.evaluation, recipe.schedule
    blocks = evaluation.blocks()
    if not blocks:
        from trustrl.world.models.accuracy import held_out_problems  # imports torch

        rows = held_out_problems(task, evaluation.count, schedule.seed, chat=recipe.task.chat)
        return [(evaluation.as_block(), rows)]
    held_out = task.rows("held_out", None, schedule.seed, recipe.task.chat)
    sets = []
    for block in blocks:
        rows = [{**row, "data_set": block.name} for row in held_out if row.get("data_set") == block.data]
        sets.append((block, rows[: block.count]))
    return sets


class Accuracies:
    """Scores of answers, collected problem by problem."""

    def __init__(self) -> None:
        self._answers: defaultdict[str, list[list[float]]] = defaultdict(list)
        self._pass_at: dict[str, Sequence[int]] = {}

    def add(self, name: str, scores: list[float], pass_at_k: Sequence[int]) -> None:
        """Adds the scores of the answers to one problem of the set `name`."""
        self._answers[name].append(scores)
        self._pass_at[name] = pass_at_k

    def means(self) -> dict[str, tuple[float, int]]:
        """Returns the mean score (Avg@n) and the number of problems of each set."""
        return {name: (fmean(map(fmean, problems)), len(problems)) for name, problems in self._answers.items()}

    def passed(self) -> dict[str, float]:
        """Returns the mean pass@k of each set, as `pass@8/aime24`. Leaves out problems with fewer than k answers."""
        means = {}
        for name, problems in self._answers.items():
            for k in self._pass_at[name]:
                estimates = [
                    pass_at(k, sum(score >= RIGHT for score in scores), len(scores))
                    for scores in problems
                    if len(scores) >= k
                ]
                if estimates:
                    means[f"pass@{k}/{name}"] = fmean(estimates)
        return means


def passed_on_verl(file: Path, recipe: Recipe, answers: int) -> dict[str, float]:
    """Returns the pass@k of each set from the answers that verl wrote after a batch, and deletes the file.

    Args:
        file: The file, a line for each answer, which verl may still be writing.
        recipe: The recipe.
        answers: The number of lines to wait for. Sequences that failed have none.
    """
    deadline = time.monotonic() + WAITING_SECONDS
    while len(lines := _lines(file)) < answers and time.monotonic() < deadline:
        time.sleep(0.5)
    scores: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for row in lines:
        name, _, problem = row["problem"].rpartition("#")
        scores[name, problem].append(row["score"])
    accuracies, blocks = Accuracies(), {block.name: block for block in recipe.evaluation.blocks()}
    for (name, _), own in scores.items():
        accuracies.add(name, own, blocks[name].pass_at or ())
    file.unlink(missing_ok=True)
    return accuracies.passed()


def _lines(file: Path) -> list[Mapping[str, Any]]:
    rows = []
    with suppress(FileNotFoundError, ValueError):  # not written yet, or not to the end of a line
        for line in file.read_text(encoding="utf-8").splitlines():
            rows.append(json.loads(line))
    return rows

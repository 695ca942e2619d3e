"""Selection of the problems that a model solves sometimes, but not always: the data of a sanity test.

    settings.json          the settings that counts depend on
    counts-1-of-4.jsonl    a line for each problem of a shard: its key, and how many of its answers are right
    selected.jsonl         the selected rows, with all columns of the data; those of a second set in selected-2.jsonl

A line is on the disk before the next problems are answered, so a killed process continues where it ended.

Reference: Defeating the Training-Inference Mismatch via FP16, arXiv 2510.26788: 20% to 80% of 40 answers are right.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from trustrl.config import validators
from trustrl.errors import ConfigError
from trustrl.files import parsed_json, read_regular, write_json, write_whole
from trustrl.runner.answer_samplers import AnswerSampling, Sample, sampler
from trustrl.runner.evaluation_sets import RIGHT
from trustrl.runner.recipe import Recipe
from trustrl.world import models, tasks
from trustrl.world.progress import ProgressDisplay
from trustrl.world.tasks import OwnData, Row

SETTINGS, COUNTS = "settings.json", "counts-*.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The rule of a selection, and the part of the problems that one process answers."""

    answers: int = 40
    """Number of answers to each problem."""

    lowest: float = 0.2
    """Smallest share of right answers."""

    highest: float = 0.8
    """Largest share of right answers."""

    shard: tuple[int, int] = (1, 1)
    """Number of this process, from 1, and number of processes."""

    batch: int = 64
    """Problems that are answered together."""

    def __post_init__(self) -> None:
        validators.whole("--answers", self.answers, low=1)
        validators.whole("--batch", self.batch, low=1)
        if not 0 <= self.lowest <= self.highest <= 1:
            raise ConfigError(f"--lowest and --highest must be shares in order, got {self.lowest} and {self.highest}.")
        number, of = self.shard
        if not 1 <= number <= of:
            raise ConfigError(f"--shard must be i/n with i from 1 to n, got {number}/{of}.")

    def keeps(self, right: int) -> bool:
        """Returns whether a problem with so many right answers is selected."""
        return self.lowest <= right / self.answers <= self.highest


class _Source(NamedTuple):
    """A problem with the row of the data that contains it."""

    data_set: int
    row: Row
    original: Mapping[str, Any]


def select(recipe: Recipe, folder: Path, rule: Selection, sample: Sample | None = None) -> dict[str, Any]:
    """Answers the problems of a shard that have no count yet. Writes the selection once all problems have one.

    Args:
        recipe: The recipe whose model, data, reward and sampler are used.
        folder: The folder of the counts, which all shards share.
        rule: The rule.
        sample: Replaces the recipe's sampler.

    Returns:
        Numbers of problems, counts and selected problems, and the files of the selection, which are empty before all
        problems have a count.
    """
    task = tasks.load(recipe.task.name, **recipe.task.settings)
    if not isinstance(task, OwnData):
        raise ConfigError(f"The recipe must have [data] and [reward] to select problems, got {recipe.task.name!r}.")
    task.start()
    sources = _sources(task, recipe)
    folder.mkdir(parents=True, exist_ok=True)
    _hold_settings(folder / SETTINGS, recipe, rule)
    number, of = rule.shard
    with _appended(folder / f"counts-{number}-of-{of}.jsonl") as lines:
        counts = _counts(folder)
        waiting = [key for key in list(sources)[number - 1 :: of] if key not in counts]
        if waiting:
            _answer(waiting, sources, task, recipe, rule, lines, sample or sampler(_sampling(recipe, rule)))
    counts = _counts(folder)
    chosen = [source for key, source in sources.items() if key in counts and rule.keeps(counts[key])]
    complete = counts.keys() >= sources.keys()
    return {
        "problems": len(sources), "counted": len(counts.keys() & sources.keys()), "selected": len(chosen),
        "files": _write(folder, chosen) if complete else [],
    }  # fmt: skip


def _answer(
    waiting: list[str],
    sources: Mapping[str, _Source],
    task: OwnData,
    recipe: Recipe,
    rule: Selection,
    lines: IO[str],
    sample: Sample,
) -> None:
    with ProgressDisplay("answering problems", len(waiting)) as progress:
        for start in range(0, len(waiting), rule.batch):
            keys = waiting[start : start + rule.batch]
            rows = [sources[key].row for key in keys]
            answers = sample(rows, recipe.schedule.seed + start)
            scores = iter(
                task.scores(
                    [text for texts in answers for text in texts],
                    [row for row, texts in zip(rows, answers, strict=True) for _ in texts],
                )
            )
            rights = [sum(next(scores) >= RIGHT for _ in texts) for texts in answers]
            for key, right in zip(keys, rights, strict=True):
                lines.write(json.dumps({"problem": key, "right": right, "answers": rule.answers}) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
            kept = sum(map(rule.keeps, rights))
            progress.update(start + len(keys), f"{kept} of the last {len(keys)} are selected")


def _sources(task: OwnData, recipe: Recipe) -> dict[str, _Source]:
    """Returns the problems by key. A problem that the data contain twice is answered once."""
    sources: dict[str, _Source] = {}
    for problem, original in task.sources():
        row = task.row(problem, recipe.task.chat)
        text = json.dumps([row["data_set"], row["prompt"], row["answer"]], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        sources.setdefault(key, _Source(problem.data_set, row, original))
    return sources


def _hold_settings(file: Path, recipe: Recipe, rule: Selection) -> None:
    """Writes the settings of the counts, or compares them with those of the counts that are there."""
    plain, names = recipe.to_dict(), ("model", "data", "reward", "sampler")
    lengths = {name: plain["schedule"][name] for name in ("max_prompt_tokens", "max_completion_tokens", "seed")}
    settings = json.loads(json.dumps({**{name: plain[name] for name in names}, **lengths, "answers": rule.answers}))
    if not file.exists():
        write_json(file, settings, synced=True)
        return
    before = parsed_json(read_regular(file))
    changed = [name for name in settings if before.get(name) != settings[name]]
    if changed:
        raise ConfigError(
            f"The counts in {file.parent} must be made with the same settings, got a change of {', '.join(changed)}. "
            "Undo the change, or choose another --out."
        )


@contextmanager
def _appended(file: Path) -> Iterator[IO[str]]:
    """Opens a file for whole lines, alone: a line that a killed process left unfinished is removed."""
    with file.open("a+", encoding="utf-8") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"A shard must have one process, got {file}, which another process writes.") from None
        opened.truncate(file.read_bytes().rfind(b"\n") + 1)
        yield opened


def _counts(folder: Path) -> dict[str, int]:
    counts = {}
    for file in sorted(folder.glob(COUNTS)):
        content = file.read_bytes()
        for line in content[: content.rfind(b"\n") + 1].splitlines():
            row = parsed_json(line)
            counts[row["problem"]] = row["right"]
    return counts


def _sampling(recipe: Recipe, rule: Selection) -> AnswerSampling:
    chosen, vllm = recipe.sampler, None
    if chosen.kind == "vllm":
        share = {} if chosen.memory_share is None else {"gpu_memory_utilization": chosen.memory_share}
        vllm = {"tensor_parallel_size": chosen.ranks, **share}
    return AnswerSampling(
        model=models.path(recipe.model.name), device=recipe.engine.device, dtype=chosen.dtype, answers=rule.answers,
        temperature=chosen.temperature, max_prompt_tokens=recipe.schedule.max_prompt_tokens,
        max_new_tokens=recipe.schedule.max_completion_tokens, vllm=vllm,
    )  # fmt: skip


def _write(folder: Path, chosen: list[_Source]) -> list[str]:
    """Writes the rows of each set to a file. Values that JSON does not have, such as dates, become text."""
    files = []
    for number in sorted({source.data_set for source in chosen}):
        file = folder / ("selected.jsonl" if number == 0 else f"selected-{number + 1}.jsonl")
        rows = [json.dumps(dict(source.original), default=str) for source in chosen if source.data_set == number]
        write_whole(file, "".join(row + "\n" for row in rows), synced=True)
        files.append(str(file))
    return files

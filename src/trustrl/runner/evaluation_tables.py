"""Table [evaluation] of a recipe, and [[evaluation.sets]]: the problems, and the answers to each."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from trustrl.config import validators
from trustrl.errors import ConfigError
from trustrl.world.tasks.own_data import table_of


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSet:
    """[[evaluation.sets]]: one benchmark. Missing keys have the values of [evaluation]."""

    data: str
    """Name of a set of [[data]] with held-out problems."""

    name: str | None = None
    """Name in metrics, `accuracy/<name>`. Defaults to `data`."""

    count: int | None = None
    """Number of its problems. Defaults to all of them."""

    answers: int | None = None
    """Number of answers to each problem, whose scores are averaged (Avg@n)."""

    temperature: float | None = None
    """Sampling temperature."""

    top_p: float | None = None
    """Smallest probability that the sampled tokens keep in total."""

    pass_at: tuple[int, ...] | None = None
    """Values of k for pass@k."""

    def __post_init__(self) -> None:
        if self.pass_at is not None:
            object.__setattr__(self, "pass_at", _ks("evaluation.sets", self.pass_at))


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """[evaluation]: accuracy on held-out problems before and after training, and optionally during it."""

    count: int = 500
    """Number of answers to score. With fewer held-out problems, some are answered more than once."""

    every: int = 0
    """Steps between evaluations. 0 evaluates before and after only. On verl a multiple of
    `schedule.updates_per_batch`."""

    temperature: float = 1.0
    """Sampling temperature. 0 decodes greedily."""

    top_p: float = 1.0
    """Smallest probability that the sampled tokens keep in total."""

    answers: int = 1
    """Number of answers to each problem, whose scores are averaged (Avg@n)."""

    pass_at: tuple[int, ...] = ()
    """Values of k for pass@k, the probability that one of k answers has a score of at least 1. Needs `sets`."""

    sets: tuple[EvaluationSet, ...] = ()
    """Benchmarks, as [[evaluation.sets]]. Without them, `count` problems of all held-out data are evaluated."""

    def __post_init__(self) -> None:
        validators.whole("evaluation.count", self.count, low=1)
        validators.whole("evaluation.every", self.every, low=0)
        object.__setattr__(self, "pass_at", _ks("evaluation", self.pass_at))
        tables = validators.several("evaluation.sets", self.sets, "tables")
        for table in tables:
            if isinstance(table, Mapping) and "data" not in table:
                raise ConfigError("evaluation.sets must have data. Name a set of [[data]] in each.")
        sets = tuple(table_of(EvaluationSet, "evaluation.sets", table) for table in tables)
        object.__setattr__(self, "sets", sets)
        _check_sampling("evaluation", self.as_block())
        for block in self.blocks():
            for name in ("data", "name"):
                validators.text(f"evaluation.sets.{name}", getattr(block, name))
            _check_sampling("evaluation.sets", block)
            if block.count is not None:
                validators.whole("evaluation.sets.count", block.count, low=1)
        names = [block.name for block in self.blocks()]
        if len(set(names)) < len(names):
            raise ConfigError(f"evaluation.sets must have different names, got {', '.join(map(str, names))}.")
        if self.pass_at and not self.sets:
            raise ConfigError("evaluation.pass_at must be left out without [[evaluation.sets]]. Name the sets.")

    @property
    def needs_answers(self) -> bool:
        """True if the score of each answer is needed, not only their mean."""
        return any(block.pass_at for block in self.blocks())

    def as_block(self) -> EvaluationSet:
        """Returns the settings that blocks share."""
        return EvaluationSet(
            data="", answers=self.answers, temperature=self.temperature, top_p=self.top_p, pass_at=self.pass_at
        )

    def blocks(self) -> list[EvaluationSet]:
        """Returns the benchmarks with all their settings."""
        shared = self.as_block()
        return [
            replace(
                shared,
                **{"name": block.data}
                | {key.name: value for key in fields(block) if (value := getattr(block, key.name)) is not None},
            )
            for block in self.sets
        ]


def _ks(where: str, value: Any) -> tuple[Any, ...]:
    return validators.several(f"{where}.pass_at", value, "whole numbers")


def _check_sampling(where: str, chosen: EvaluationSet) -> None:
    validators.real(f"{where}.top_p", chosen.top_p, rule="a share in (0, 1]", low=0.0, high=1.0)
    validators.whole(f"{where}.answers", chosen.answers, low=1)
    validators.non_negative(f"{where}.temperature", chosen.temperature)
    for k in chosen.pass_at or ():
        validators.whole(f"{where}.pass_at", k, low=1)
        if k > (chosen.answers or 1):
            raise ConfigError(f"{where}.pass_at must be at most answers, {chosen.answers}, got {k}.")

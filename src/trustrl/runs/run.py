"""One run as its files describe it. Readers create it, and every tool takes it.

A reader fills in what the files contain and lists what they lack, so that a tool can say what it could not check.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["finished", "unfinished", "failed", "unknown"]
Row = dict[str, Any]
"""`step` and metrics by name. A value is a number, or None if it was not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Settings that rules and reports read. None if the files do not contain the setting."""

    engine: str | None = None
    """Name of the trainer, such as "trl" or "verl"."""

    engine_version: str | None = None
    model: str | None = None
    task: str | None = None
    region: dict[str, Any] | None = None
    """Settings of a trustrl region. None if another loss trained the run, or if it is unknown."""

    loss: str | None = None
    """Name of the engine's own loss, such as "grpo" or "vanilla"."""

    steps_planned: int | None = None
    updates_per_batch: int | None = None
    """Optimizer steps on each batch of rollouts."""

    completions_per_prompt: int | None = None
    learning_rate: float | None = None
    trainer_dtype: str | None = None
    sampler_dtype: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled completion. Fields that the files lack are None."""

    step: int
    """Step of the metrics row that the completion was trained in."""

    prompt: str | None = None
    text: str | None = None
    group: str | None = None
    """Equal for completions of one prompt in one batch."""

    reward: float | None = None
    """The reward that the trainer used. None if it is missing or not finite."""

    rewards: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Reward by component."""

    advantage: float | None = None
    stop_reason: str | None = None
    """Reason that sampling stopped, such as "stop" or "length"."""

    task_id: str | None = None
    num_tokens: int | None = None
    sequence: int | None = None
    """Id of the sequence in the token records."""

    token_ids: tuple[int, ...] | None = None
    behavior_logp: tuple[float, ...] | None = None
    """log μ of each token, recorded by the sampler."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that the files do not contain."""

    what: str
    """The metric, column or setting, such as "sampler log-probs"."""

    would_tell: str
    """The question that it would answer."""

    how: str
    """Setting or call that records it in the next run."""


def no_completions() -> Iterator[Completion]:
    """Yields nothing, for runs without completions."""
    yield from ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run."""

    path: str
    """Path or address that the user gave."""

    name: str
    source: str
    """Name of the format, such as "TRL trainer_state.json" or "W&B offline run"."""

    settings: RunSettings
    rows: list[Row]
    """Metrics by step, in order, under the names of `trustrl.runs.metric_names`. Unknown metrics keep their names."""

    row_is: Literal["update", "batch"] = "update"
    """Span of a row: one optimizer step, or all steps on a batch of rollouts. `step` counts rows of this kind,
    except in run directories of `trustrl run`, where it counts optimizer steps."""

    steps_per_row: int = 1
    """Steps that each row averages over, such as TRL's `logging_steps`."""

    rows_in: str = ""
    """File of the rows, relative to the path."""

    evaluations: list[Row] = field(default_factory=list[Row])
    """`step`, `accuracy` and, if known, `count`. Other validation metrics keep their names."""

    evaluations_in: str = ""
    """File of the evaluations, relative to the path."""

    completions: Callable[[], Iterator[Completion]] = no_completions
    """Yields the completions in order of steps. Reads files only when called."""

    records: tuple[str, ...] = ()
    """Folders or addresses of token records."""

    recipe: dict[str, Any] = field(default_factory=dict[str, Any])
    """Contents of recipe.toml; empty if `trustrl run` did not create the run."""

    status: Status = "unknown"
    seconds: float | None = None
    last_words: str = ""
    """Last lines of the log of a run that did not finish."""

    found: tuple[str, ...] = ()
    """Findings of the reader, one short phrase each, such as "120 steps of metrics in trainer_state.json"."""

    missing: tuple[Missing, ...] = ()
    faults: tuple[str, ...] = ()
    """Files, or parts of files, that could not be read, with the reason."""

    @property
    def steps(self) -> int:
        """Step of the last row, or 0."""
        return self.rows[-1]["step"] if self.rows else 0

"""Contribution of one reader to a run, the run that several contributions make, and the contents that it lacks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trustrl.runs.metric_names import is_validation
from trustrl.runs.points import Points, divided
from trustrl.runs.run import Completion, Missing, Row, Run, RunSettings, Status, no_completions

RECORD = "Record tokens: trustrl.engines.trl.record(trainer) in TRL, TRUSTRL_RECORD=FOLDER in verl."

_MISMATCH = ("trustrl/mismatch_abs_mean", "training/rollout_probs_diff_mean", "rollout_corr/kl", "rollout_corr/k3_kl")
_METRICS: tuple[tuple[str, tuple[str, ...], str, dict[str, str]], ...] = (
    (
        "sampler-trainer mismatch", _MISMATCH,
        "Do sampler and trainer disagree about the same tokens at the same weights?",
        {
            "trl": "Sample with vLLM: TRL then logs sampling/sampling_logp_difference.",
            "verl": "Set actor_rollout_ref.rollout.calculate_log_probs=True.",
        },
    ),
    (
        "entropy", ("entropy", "trustrl/entropy"), "Does the policy stop exploring?",
        {"verl": "Set actor_rollout_ref.actor.calculate_entropy=True."},
    ),
    (
        "share of clipped or masked tokens", ("clip_share", "trustrl/masked_share"),
        "Does the trust region act, and how often?", {},
    ),
    (
        "groups with identical rewards", ("frac_reward_zero_std",), "Which share of the groups has no gradient?",
        {"verl": "Set trainer.rollout_data_dir; the rewards of each group are in the dumps."},
    ),
)  # fmt: skip
_COMPLETIONS = {
    "trl": "Set log_completions=True.",
    "verl": "Set trainer.rollout_data_dir to a folder.",
}
_EVALUATIONS = {
    "trl": 'Pass an eval_dataset and set eval_strategy="steps".',
    "verl": "Set data.val_files and trainer.test_freq.",
}
_SETTINGS = {
    "trl": 'Set report_to="tensorboard", "wandb" or "trackio": TRL then stores its arguments with the metrics. '
    "training_args.bin contains them too, but it is a pickle, which trustrl does not load.",
    "verl": "Keep hydra's folder (.hydra/config.yaml) or the console log, which prints the configuration.",
}
_ELSEWHERE = "Log it in the trainer, or record tokens with trustrl."
"""The answer to what a trainer that we do not know must do."""


@dataclass(kw_only=True, slots=True)
class Part:
    """Contents of one source, such as a file or a folder of files."""

    source: str
    engine: str | None = None
    name: str | None = None
    rows: list[Row] = field(default_factory=list[Row])
    rows_in: str = ""
    evaluations: list[Row] = field(default_factory=list[Row])
    evaluations_in: str = ""
    evaluated: set[int] = field(default_factory=set[int])
    """Steps with any validation metric."""

    row_is: Literal["update", "batch"] = "update"
    steps_per_row: int = 1
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `RunSettings` that the source contains."""

    completions: Callable[[], Iterator[Completion]] | None = None
    records: tuple[str, ...] = ()
    recipe: dict[str, Any] = field(default_factory=dict[str, Any])
    status: Status = "unknown"
    seconds: float | None = None
    last_words: str = ""
    found: list[str] = field(default_factory=list[str])
    faults: list[str] = field(default_factory=list[str])

    def take(self, points: Points, where: str) -> None:
        """Fills in rows, evaluations and the engine from metrics, and adds to `found`."""
        self.engine, self.rows_in, self.evaluations_in = self.engine or points.engine(), where, where
        rows = points.renamed(self.engine)
        self.evaluated = {row["step"] for row in rows if any(map(is_validation, row))}
        self.rows, self.evaluations, score = divided(rows)
        if self.engine == "verl":
            self.row_is = "batch"
        if self.rows:
            self.found.append(f"{counted(len(self.rows), 'row')} of metrics in {where}")
        if self.evaluations:
            self.found.append(f"{counted(len(self.evaluations), 'evaluation')} in {where}, accuracy from {score}")
        elif self.evaluated:
            self.found.append(f"{counted(len(self.evaluated), 'evaluation')} in {where}, none with an accuracy")

    @property
    def size(self) -> int:
        """Number of values in the rows."""
        return sum(value is not None for row in self.rows for value in row.values())


def counted(count: int, noun: str) -> str:
    """Returns the count with its noun.

    Example:
        >>> counted(1, "row"), counted(1200, "row")
        ('1 row', '1,200 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def merged(parts: Sequence[Part], path: str, name: str) -> Run:
    """Returns one run: its rows from the part with the most values, other fields from the first part that has them.

    Parts come in order of preference, which decides if two have equally many values.
    """
    richest = max(parts, key=lambda part: part.size)
    ordered = [richest, *(part for part in parts if part is not richest)]
    engine = next((part.engine for part in ordered if part.engine), None)
    settings: dict[str, Any] = {}
    for part in ordered:
        settings = {**{key: value for key, value in part.settings.items() if value is not None}, **settings}
    settings.setdefault("engine", engine)
    chosen = RunSettings(**settings)
    findings = [finding for part in parts for finding in part.found]
    others = [part.source for part in parts if part is not richest and part.rows]
    if others:
        findings.append(f"metrics from {richest.source}; not from {', '.join(others)}, with no more values")
    rows = richest.rows
    recorded = [part for part in ordered if part.records]  # their completions are those of the recorded tokens
    completions = _first([*recorded, *ordered], "completions")
    return Run(
        path=path, name=_first(ordered, "name") or name, source=" + ".join(dict.fromkeys(p.source for p in parts)),
        settings=chosen, rows=rows, rows_in=richest.rows_in, row_is=richest.row_is, steps_per_row=richest.steps_per_row,
        evaluations=_evaluations(ordered),
        evaluations_in=next((part.evaluations_in for part in ordered if part.evaluations), ""),
        completions=completions or no_completions,
        records=tuple(dict.fromkeys(folder for part in parts for folder in part.records)),
        recipe=_first(ordered, "recipe") or {}, status=_status(ordered, rows, chosen),
        seconds=_first(ordered, "seconds"), last_words=_first(ordered, "last_words") or "", found=tuple(findings),
        missing=missing_from(
            engine, rows, settings, completions=completions is not None,
            evaluated=any(part.evaluations or part.evaluated for part in parts),
            recorded=any(part.records for part in parts),
        ),
        faults=tuple(dict.fromkeys(fault for part in parts for fault in part.faults)),
    )  # fmt: skip


def _evaluations(parts: Sequence[Part]) -> list[Row]:
    """Returns the evaluations of the first part that has them, with the counts that other parts have."""
    chosen = _first(parts, "evaluations") or []
    counts = {row["step"]: row["count"] for part in parts for row in part.evaluations if row.get("count")}
    return [
        row if "count" in row or row["step"] not in counts else {**row, "count": counts[row["step"]]} for row in chosen
    ]


def _first(parts: Sequence[Part], name: str) -> Any:
    return next((value for part in parts if (value := getattr(part, name))), None)


def _status(parts: Sequence[Part], rows: Sequence[Mapping[str, Any]], settings: RunSettings) -> Status:
    known = [part.status for part in parts if part.status != "unknown"]
    if "finished" in known:
        return "finished"
    if "failed" in known:
        return "failed"
    if not known and settings.steps_planned and rows:
        return "finished" if rows[-1]["step"] >= settings.steps_planned else "unfinished"
    return "unfinished" if known else "unknown"


def missing_from(
    engine: str | None, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], *, completions: bool,
    evaluated: bool, recorded: bool,
) -> tuple[Missing, ...]:  # fmt: skip
    """Returns the contents that a run lacks: the question each would answer, and the setting that records it."""
    names = {name for row in rows for name, value in row.items() if value is not None}
    engine = engine or ""
    missing = [
        Missing(what, would_tell, how.get(engine, _ELSEWHERE))
        for what, any_of, would_tell, how in _METRICS
        if names.isdisjoint(any_of)
    ]
    if not rows:
        missing = [Missing("metrics", "Did the reward rise, and was training stable?", "Keep the trainer's log.")]
    if not evaluated:
        how = _EVALUATIONS.get(engine, "Evaluate on held-out problems while training.")
        missing.append(Missing("evaluations", "Does the held-out accuracy follow the training reward?", how))
    if not completions:
        how = _COMPLETIONS.get(engine, "Store the rollouts in the trainer.")
        missing.append(Missing("completions", "Which texts got which rewards?", how))
    if settings.get("updates_per_batch") is None or settings.get("temperature") is None:
        how = _SETTINGS.get(engine, "Keep the trainer's configuration next to its metrics.")
        missing.append(Missing("settings", "Which learning rate, sampling and batches trained the run?", how))
    if not recorded:
        would = "Which tokens moved, which would another region mask, and where do sampler and trainer disagree?"
        missing.append(Missing("token records", would, RECORD))
    return tuple(missing)

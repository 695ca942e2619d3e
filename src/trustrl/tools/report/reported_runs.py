"""Runs as reports show them: with a label, the region and settings in plain words, and the verdict so far."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trustrl.config.axes import Region, reads_ages
from trustrl.config.statistics import Statistic
from trustrl.config.terms import TIS, DivergenceGate
from trustrl.errors import TrustRLError
from trustrl.recording.run_file import read_run
from trustrl.regions.loading import config_from_dict
from trustrl.regions.words import MEASURES, measure_in_words, number
from trustrl.runs.run import Run, RunSettings
from trustrl.runs.run_verdict import collapsed, summary

FACT_LABELS = {"a step": "batch", "updates a batch": "updates per batch"}
"""Names of facts that reports show differently from `--json`."""

_PROPER = {"trl": "TRL", "vllm": "vLLM", "skyrl": "SkyRL"}


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """One run of a report."""

    run: Run
    label: str
    """Label that distinguishes it from the other runs of the report."""

    region: Region | None
    """None if another loss trained the run, or if the region is not registered here."""

    verdict: dict[str, Any]
    """Summary of the run so far, by the rules of `trustrl.runs.run_verdict`."""

    plain_region: Mapping[str, Any]
    """Settings of the region; empty if there is none."""

    observed: bool
    """True if the region only observed: its verdicts are in the records, and the engine's own loss trained the run."""


def letter(run: int) -> str:
    """Returns the run's letter in charts."""
    return chr(65 + run) if run < 26 else f"R{run + 1}"


def reported(runs: Sequence[tuple[str, Run]]) -> list[ReportedRun]:
    """Adds regions and verdicts to labelled runs, as `trustrl.runs.open_run.open_runs` returns them."""
    reported_runs = []
    for label, run in runs:
        measured = [row for row in run.evaluations if row.get("accuracy") is not None]
        verdict = summary(run.rows, measured, updates_per_row(run))
        if not all(row.get("count") for row in measured):  # no standard error: the rewards decide
            verdict["collapsed"] = collapsed(run.rows, [], updates_per_row(run))
        plain, observed = run.settings.region or _observed(run), not run.settings.region
        reported_runs.append(ReportedRun(run, label, _region(plain), verdict, plain, observed and bool(plain)))
    return reported_runs


def _observed(run: Run) -> Mapping[str, Any]:
    """Returns the region of the records, which only observed if the run was trained without one."""
    for folder in run.records:
        with suppress(TrustRLError):  # the reader has listed the fault
            described = read_run(folder)
            if described and described["region"]:
                return described["region"]
    return {}


def _region(plain: Mapping[str, Any]) -> Region | None:
    if not plain:
        return None
    try:
        region = config_from_dict(plain)
    except (TrustRLError, TypeError, KeyError):
        return None
    return region if isinstance(region, Region) else None


def updates_per_row(run: Run) -> int:
    """Returns the number of steps that repeat one rollout's reward: the updates per batch, or 1 if rows are batches."""
    if run.row_is == "batch" and not run.recipe:
        return 1
    return run.settings.updates_per_batch or 1


def measured_step(run: Run, step: int, update: int | None = None) -> int:
    """Returns the step of the metrics row that a token record belongs to.

    TRL records count the updates before it. verl records count batches, and the updates within a batch from 0. Run
    directories of `trustrl run` count updates from 1; without `update`, the result is the last update of the batch.
    """
    if run.settings.engine != "verl":
        return step + 1
    if not run.recipe:
        return step
    updates = run.settings.updates_per_batch or 1
    return step * updates if update is None else (step - 1) * updates + update + 1


def statistic_of(region: Region | None) -> Statistic | None:
    """Returns the statistic that measures a token's distance, or None if the region has none."""
    for name in ("statistic", "divergence", "ratio", "log_ratio"):
        statistic = getattr(region, name, None)
        if isinstance(statistic, Statistic):
            return statistic
    return None


def unit_of(region: Region | None) -> str | None:
    """Returns the unit of the region's divergence, or None if it has none."""
    statistic = statistic_of(region)
    return None if statistic is None else MEASURES.get(statistic.kind, ("", "the statistic's unit"))[1]


def region_in_words(region: Region | None, plain: Mapping[str, Any], *, observed: bool = False) -> str:
    """Describes in one or two sentences what the region does to a token. Returns an empty text without a region."""
    if region is None and not plain:
        return ""
    if observed:
        return f"Only observed; the engine's own loss trained this run. {region_in_words(region, plain)}"
    if region is None:
        return f"{plain.get('kind', 'no region')}, which is not registered here: {_listed(plain)}."
    text = region.words()
    if not text:
        return f"{region.kind}: {_listed(plain)}."
    correction = getattr(region, "correction", None)
    if correction is not None:
        text = f"{text} {_correction(correction)}"
    if reads_ages(region):
        then = "are dropped" if region.when_stale == "drop" else "have a tighter bound"
        text = f"{text} Tokens older than {region.max_staleness} weight versions {then}."
    return text


def _listed(plain: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in plain.items() if key != "kind") or "no settings"


def _correction(correction: Any) -> str:
    level = getattr(correction, "level", "token")
    if isinstance(correction, DivergenceGate):
        what, unit = measure_in_words(correction.divergence, "μ")
        over = "sequence with a mean" if level == "sequence" else "token with a"
        gap = what.replace("π", "π'")
        bound = f"{number(correction.divergence.bounds[0])} ({unit})"
        return f"The mismatch π'/μ multiplies the weight; a {over} divergence above {bound} is dropped: {gap}."
    if isinstance(correction, TIS):
        product = "The product of the mismatch π'/μ over the response" if level != "token" else "The mismatch π'/μ"
        return f"{product} multiplies the weight, up to {number(correction.max_ratio)}."
    over = {"sequence-mean": "sequence with a mean", "sequence-product": "sequence with a product of the"}
    over = over.get(level, "token with a")
    band = f"[{number(correction.min_ratio)}, {number(correction.max_ratio)}]"
    return f"The mismatch π'/μ multiplies the weight; a {over} mismatch outside {band} is dropped."


def facts(run: Run) -> dict[str, str]:
    """Returns short facts about a run by name, omitting those that its files do not contain."""
    known = _recipe_facts(run.recipe) if run.recipe else _settings_facts(run.settings)
    return {name: str(value) for name, value in known.items() if value not in (None, "")}


def _recipe_facts(recipe: Mapping[str, Any]) -> dict[str, Any]:
    def of(table: str, key: str, default: Any = None) -> Any:
        settings = recipe.get(table)
        return settings.get(key, default) if isinstance(settings, Mapping) else default

    ranks, device = (of("engine", "nodes") or 1) * (of("engine", "ranks_per_node") or 1), of("engine", "device")
    prompts, completions = of("schedule", "prompts_per_step"), of("schedule", "completions_per_prompt")
    return {
        "model": _joined(of("model", "name"), of("model", "dtype")),
        "task": of("task", "name"),
        "engine": _joined(_PROPER.get(of("engine", "name"), of("engine", "name")), device and f"{ranks} × {device}"),
        "sampler": _joined(_PROPER.get(of("sampler", "kind"), of("sampler", "kind")), of("sampler", "dtype")),
        "a step": prompts and f"{prompts} × {completions} completions",
        "updates a batch": of("schedule", "updates_per_batch"),
        "learning rate": of("optimiser", "learning_rate"),
        "seed": of("schedule", "seed"),
    }


def _settings_facts(settings: RunSettings) -> dict[str, Any]:
    engine = _PROPER.get(settings.engine or "", settings.engine)
    version = f" {settings.engine_version}" if settings.engine_version else ""
    sampling = [("temperature", settings.temperature), ("top-p", settings.top_p), ("top-k", settings.top_k)]
    return {
        "model": _joined(settings.model, settings.trainer_dtype),
        "task": settings.task,
        "engine": engine and f"{engine}{version}",
        "loss": settings.loss,
        "sampler": settings.sampler_dtype,
        "sampling": _joined(*(f"{name} {value}" for name, value in sampling if value is not None)),
        "completions per prompt": settings.completions_per_prompt,
        "updates a batch": settings.updates_per_batch,
        "learning rate": settings.learning_rate,
        "seed": settings.seed,
    }


def _joined(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part is not None)

"""Runs as reports show them: with a label, the region, and the verdict so far."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trustrl.config.axes import Region
from trustrl.errors import TrustRLError
from trustrl.recording.run_file import read_run
from trustrl.regions.loading import config_from_dict
from trustrl.runs.run import Run
from trustrl.runs.run_verdict import collapsed, summary


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


def reported(runs: Sequence[tuple[str, Run]]) -> list[ReportedRun]:
    """Adds regions and verdicts to labelled runs, as `trustrl.runs.open_run.open_runs` returns them."""
    reported_runs = []
    for label, run in runs:
        measured = _measured(run)
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


def _measured(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.evaluations if row.get("accuracy") is not None]


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

"""Runs as reports show them: with a label, the region, and the verdict so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trustrl.config.axes import Region
from trustrl.config.loading import config_from_dict
from trustrl.errors import TrustRLError
from trustrl.runner.run_verdict import summary
from trustrl.runs.run import Run


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """One run of a report."""

    run: Run
    label: str
    """Label that distinguishes it from the other runs of the report."""

    region: Region | None
    """None if another loss trained the run, or if the region is not registered here."""

    verdict: dict[str, Any]
    """Summary of the run so far, by the rules of `trustrl.runner.run_verdict`."""

    @property
    def plain_region(self) -> Mapping[str, Any]:
        """Settings of the region; empty if there is none."""
        return self.run.settings.region or {}


def reported(runs: Sequence[tuple[str, Run]]) -> list[ReportedRun]:
    """Adds regions and verdicts to labelled runs, as `trustrl.runs.open_run.open_runs` returns them."""
    return [
        ReportedRun(run, label, _region(run), summary(run.rows, _measured(run), updates_per_row(run)))
        for label, run in runs
    ]


def _measured(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.evaluations if row.get("accuracy") is not None]


def _region(run: Run) -> Region | None:
    if not run.settings.region:
        return None
    try:
        found = config_from_dict(run.settings.region)
    except (TrustRLError, TypeError, KeyError):
        return None
    return found if isinstance(found, Region) else None


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

"""Diagnosis of one run: applies every rule, ranks the causes, and formats them for the terminal."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trustrl.errors import RecordError
from trustrl.runner.run_verdict import NO_METRICS
from trustrl.runs.open_run import open_run
from trustrl.runs.run import Missing, Run
from trustrl.tools.explain import replica_rules, sampler_rules, signal_rules, step_rules
from trustrl.tools.explain.causes import Cause, Number, ranked
from trustrl.tools.explain.evidence import Evidence
from trustrl.tools.explain.gap_classes import GapClass, classes_of
from trustrl.tools.explain.metric_sources import origin
from trustrl.tools.explain.recorded_gap import tokens_of
from trustrl.tools.explain.unchecked import unchecked

NOTHING = "nothing found"

RULES = (
    signal_rules.non_finite_values,
    signal_rules.completions_cut_off,
    replica_rules.stale_replica,
    sampler_rules.stale_weights,
    sampler_rules.truncated_support,
    sampler_rules.wrong_temperature,
    sampler_rules.tied_head_not_synced,
    step_rules.learning_rate_too_large,
    step_rules.too_many_updates,
    signal_rules.no_learning_signal,
    signal_rules.entropy_collapse,
    signal_rules.entropy_explosion,
)
"""Each rule looks for one cause, independently of the others."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Likely causes of a failed run, and what its files could not show."""

    run: Run
    causes: list[Cause]
    """Most likely first. Empty if no rule applies."""

    gap: list[GapClass]
    """Classes of recorded tokens with their shares of the sampler-trainer gap. Empty without records."""

    unchecked: list[Missing]

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `trustrl explain --json` prints."""
        return {
            "run": self.run.path,
            "source": self.run.source,
            "findings": [one.to_dict() for one in self.causes],
            "gap": [one.to_dict() for one in self.gap],
            "unchecked": [asdict(one) for one in self.unchecked],
        }

    def text(self) -> str:
        """Formats the causes for the terminal, one paragraph each, and the list of what was not checked."""
        parts = [_paragraph(place, one) for place, one in enumerate(self.causes, 1)] or [NOTHING]
        if self.unchecked:
            parts.append("\n".join(["not checked:", *(_line(one) for one in self.unchecked)]))
        return "\n\n".join(parts)


def explain(source: str | Path | Run) -> Explanation:
    """Diagnoses a run of any trainer.

    Args:
        source: A path that `trustrl.runs.open_run` reads, or a run.

    Raises:
        ConfigError: If the path is not a run.
        RecordError: If a file cannot be read, or the run has no metrics.
    """
    run = source if isinstance(source, Run) else open_run(source)
    if not run.rows:
        raise RecordError(f"{run.path}: {NO_METRICS}")
    evidence = Evidence(run)
    causes = ranked([_sourced(found, run) for rule in RULES if (found := rule(evidence)) is not None])
    return Explanation(run, causes, classes_of(tokens_of(run)), unchecked(evidence))


def _sourced(cause: Cause, run: Run) -> Cause:
    """Returns the cause with the logged metrics that its numbers were computed from."""
    return replace(cause, numbers=tuple(replace(one, source=origin(run.rows, one.metric)) for one in cause.numbers))


def _paragraph(place: int, cause: Cause) -> str:
    lines = [f"{place}. {cause.name} (confidence {cause.confidence:.2f})", f"   {cause.reason}"]
    lines += [f"   {_number(one)}" for one in cause.numbers]
    return "\n".join([*lines, f"   fix: {cause.action}"])


def _number(one: Number) -> str:
    value = "not finite" if one.value is None else f"{one.value:.3g}, {one.side} {one.limit:.3g}: {one.what}"
    metric = one.metric if one.source is None else f"{one.metric}, by {one.source},"
    return f"- {metric} (from step {one.step}) {value}\n     healthy: {one.healthy}"


def _line(one: Missing) -> str:
    return f"- {one.what}: {one.would_tell} {one.how}"

"""Diagnosis of one run: applies every rule, ranks the causes, and formats them for the terminal."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trustrl.errors import RecordError
from trustrl.runs.open_run import open_run
from trustrl.runs.run import Missing, Run
from trustrl.runs.run_verdict import NO_METRICS
from trustrl.tools.explain import replica_rules, sampler_rules, signal_rules, step_rules
from trustrl.tools.explain.causes import Cause, Number, ranked
from trustrl.tools.explain.evidence import Evidence
from trustrl.tools.explain.metric_sources import origin
from trustrl.tools.explain.recorded_gap import GapClass, classes_of, tokens_of
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
            "findings": [cause.to_dict() for cause in self.causes],
            "gap": [gap_class.to_dict() for gap_class in self.gap],
            "unchecked": [asdict(missing) for missing in self.unchecked],
        }

    def text(self) -> str:
        """Formats the causes for the terminal, one paragraph each, and the list of what was not checked."""
        parts = [_paragraph(place, cause) for place, cause in enumerate(self.causes, 1)] or [NOTHING]
        if self.unchecked:
            parts.append("\n".join(["not checked:", *(_line(missing) for missing in self.unchecked)]))
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
    causes = ranked([_sourced(cause, run) for rule in RULES if (cause := rule(evidence)) is not None])
    return Explanation(run, causes, classes_of(tokens_of(run)), unchecked(evidence))


def _sourced(cause: Cause, run: Run) -> Cause:
    """Returns the cause with the logged metrics that its numbers were computed from."""
    return replace(
        cause, numbers=tuple(replace(number, source=origin(run.rows, number.metric)) for number in cause.numbers)
    )


def _paragraph(place: int, cause: Cause) -> str:
    lines = [f"{place}. {cause.name} (confidence {cause.confidence:.2f})", f"   {cause.reason}"]
    lines += [f"   {_number(number)}" for number in cause.numbers]
    return "\n".join([*lines, f"   fix: {cause.action}"])


def _number(number: Number) -> str:
    value = (
        "not finite" if number.value is None else f"{number.value:.3g}, {number.side} {number.limit:.3g}: {number.what}"
    )
    metric = number.metric if number.source is None else f"{number.metric}, by {number.source},"
    return f"- {metric} (from step {number.step}) {value}\n     healthy: {number.healthy}"


def _line(missing: Missing) -> str:
    return f"- {missing.what}: {missing.would_tell} {missing.how}"

"""Diagnosis of one run: applies every rule, ranks the causes, and formats them for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from trustrl.tools.explain import sampler_rules, signal_rules, step_rules
from trustrl.tools.explain.causes import Cause, Number, ranked
from trustrl.tools.explain.evidence import read_evidence

NOTHING = "nothing found"

RULES = (
    signal_rules.non_finite_values,
    sampler_rules.stale_weights,
    sampler_rules.truncated_support,
    sampler_rules.wrong_temperature,
    sampler_rules.tied_head_not_synced,
    step_rules.learning_rate_too_large,
    step_rules.too_many_updates,
    signal_rules.no_learning_signal,
    signal_rules.entropy_collapse,
)
"""Each rule looks for one cause, independently of the others."""


def explain(folder: Path) -> list[Cause]:
    """Returns the likely causes of a failed run, most likely first. The list is empty if no rule applies."""
    run = read_evidence(folder)
    return ranked([found for rule in RULES if (found := rule(run)) is not None])


def text(causes: Sequence[Cause]) -> str:
    """Formats causes for the terminal, one paragraph each."""
    return "\n\n".join(_paragraph(place, one) for place, one in enumerate(causes, 1)) or NOTHING


def _paragraph(place: int, cause: Cause) -> str:
    lines = [f"{place}. {cause.name} (confidence {cause.confidence:.2f})", f"   {cause.reason}"]
    lines += [f"   {_number(one)}" for one in cause.numbers]
    return "\n".join([*lines, f"   fix: {cause.action}"])


def _number(one: Number) -> str:
    value = "not finite" if one.value is None else f"{one.value:.3g}, {one.side} {one.limit:.3g}: {one.what}"
    return f"- {one.metric} (from step {one.step}) {value}\n     healthy: {one.healthy}"

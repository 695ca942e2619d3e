"""Findings for a terminal."""

from collections.abc import Sequence

from trustrl.explain.findings import Finding, Number

NOTHING = "nothing found"


def text(findings: Sequence[Finding]) -> str:
    """One paragraph each, the first the likeliest."""
    return "\n\n".join(_paragraph(place, one) for place, one in enumerate(findings, 1)) or NOTHING


def _paragraph(place: int, found: Finding) -> str:
    lines = [f"{place}. {found.name} (confidence {found.confidence:.2f})", f"   {found.reason}"]
    lines += [f"   {_number(one)}" for one in found.numbers]
    return "\n".join([*lines, f"   do: {found.action}"])


def _number(one: Number) -> str:
    value = "not finite" if one.value is None else f"{one.value:.3g}, {one.side} {one.limit:.3g}: {one.what}"
    return f"- {one.metric} (from step {one.step}) {value}\n     healthy: {one.healthy}"

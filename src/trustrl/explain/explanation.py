"""All rules on one run, ranked."""

from pathlib import Path

from trustrl.explain import sampler, signal, steps
from trustrl.explain.evidence import read_evidence
from trustrl.explain.findings import Finding, ranked

RULES = (
    signal.non_finite_values,
    sampler.stale_weights,
    sampler.truncated_support,
    sampler.wrong_temperature,
    sampler.tied_head_not_synced,
    steps.learning_rate_too_large,
    steps.too_many_updates,
    signal.no_learning_signal,
    signal.entropy_collapse,
)
"""Each looks for one cause and knows nothing of the others' findings."""


def explain(folder: Path) -> list[Finding]:
    """Why a run went wrong, likeliest causes first; empty where nothing was found."""
    run = read_evidence(folder)
    return ranked([found for rule in RULES if (found := rule(run)) is not None])

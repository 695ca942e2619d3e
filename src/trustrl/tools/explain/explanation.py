"""Diagnosis of one run: applies every rule, ranks the causes, and lists what the files of the run could not show."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trustrl.errors import RecordError
from trustrl.runs.metric_names import AT_LIMIT, CUT, LONGEST
from trustrl.runs.open_run import open_run
from trustrl.runs.run import Missing, Run
from trustrl.runs.run_verdict import NO_METRICS
from trustrl.tools.explain import sampler_rules, signal_rules, step_rules
from trustrl.tools.explain.causes import Cause
from trustrl.tools.explain.evidence import (
    ENTROPY,
    EQUAL,
    GAP,
    GRADIENT,
    KL,
    RATIO,
    REWARD,
    Evidence,
    first_and_last,
    middle,
    origin,
)
from trustrl.tools.explain.recorded_gap import GapClass, classes_of, tokens_of
from trustrl.tools.probe import EXACT

EQUAL_REWARDS = "groups with identical rewards"
BOTH_LOGPROBS = (
    "Log the sampler's log-probs and the trainer's at the rollout's weights (TRL: use_vllm with "
    "vllm_importance_sampling_correction; verl: rollout.calculate_log_probs=True and no bypass_mode)."
)

RULES = (
    signal_rules.non_finite_values,
    signal_rules.completions_cut_off,
    sampler_rules.stale_replica,
    sampler_rules.stale_weights,
    sampler_rules.truncated_support,
    sampler_rules.wrong_from_the_start,
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
            "gap": [asdict(gap_class) for gap_class in self.gap],
            "unchecked": [asdict(missing) for missing in self.unchecked],
        }

    def text(self) -> str:
        """Formats the causes for the terminal, one paragraph each, and the list of what was not checked."""
        parts = []
        for place, cause in enumerate(self.causes, 1):
            lines = [f"{place}. {cause.name} (confidence {cause.confidence:.2f})", f"   {cause.reason}"]
            for number in cause.numbers:
                metric = number.metric if number.source is None else f"{number.metric}, by {number.source},"
                beyond = f"{number.side} {number.limit:.3g}: {number.what}"
                value = "not finite" if number.value is None else f"{number.value:.3g}, {beyond}"
                lines += [f"   - {metric} (from step {number.step}) {value}", f"     healthy: {number.healthy}"]
            parts.append("\n".join([*lines, f"   fix: {cause.action}"]))
        if self.unchecked:
            missing = [f"- {missing.what}: {missing.would_tell} {missing.how}" for missing in self.unchecked]
            parts.append("\n".join(["not checked:", *missing]))
        return "\n\n".join(parts if self.causes else ["nothing found", *parts])


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
    causes = [cause for rule in RULES if (cause := rule(evidence)) is not None]
    for index, cause in enumerate(causes):
        numbers = (replace(number, source=origin(run.rows, number.metric)) for number in cause.numbers)
        causes[index] = replace(cause, numbers=tuple(numbers))
    causes.sort(key=lambda cause: (cause.order, -cause.confidence))
    return Explanation(run, causes, classes_of(tokens_of(run)), _unchecked(evidence))


def _unchecked(run: Evidence) -> list[Missing]:
    """Returns everything that rules lacked, the reader's findings first."""
    entries = {missing.what: missing for missing in run.run.missing}
    if run.per_batch(EQUAL):  # verl's advantages show it too
        entries.pop(EQUAL_REWARDS, None)
    for missing in (*_gap(run), *_steps(run), *_signal(run)):
        known = entries.get(missing.what)  # the reader knows the trainer's setting
        entries[missing.what] = missing if known is None else replace(missing, how=known.how)
    return list(entries.values())


def _gap(run: Evidence) -> Iterator[Missing]:
    """Yields what the rules on the sampler lacked."""
    gaps, settings = run.per_batch(GAP), run.run.settings
    dtypes = settings.trainer_dtype, settings.sampler_dtype
    if not gaps:
        yield Missing(
            "sampler-trainer mismatch",
            "Does the sampler have stale weights, another temperature, or another head?",
            BOTH_LOGPROBS,
        )
        return
    if not run.per_batch(RATIO):
        yield Missing(RATIO, "Does the sampler truncate the distribution?", BOTH_LOGPROBS)
    if EXACT < middle(gaps) <= sampler_rules.HALF_PRECISION and not sampler_rules.is_exact(run) and None in dtypes:
        yield Missing(
            "dtypes of sampler and trainer", f"Is the gap of {middle(gaps):.2g} nats rounding or a fault?",
            "Keep the trainer's configuration next to its log.",
        )  # fmt: skip
    if middle(gaps) > EXACT and tokens_of(run.run) is None:
        yield Missing(
            "token records", "Which tokens carry the gap, and is it a temperature or other weights?",
            "Record tokens with both log-probs: see the guide on records.",
        )  # fmt: skip


def _steps(run: Evidence) -> Iterator[Missing]:
    """Yields what the rules on the distance of updates lacked."""
    updates = run.run.settings.updates_per_batch
    if updates is None:
        taken = run.updates_from_rewards
        known = "" if taken is None else f" Taken as {taken} here, the distance between rows with a reward."
        yield Missing(
            "updates per batch", f"Are there too many updates on each batch?{known}",
            "Keep the trainer's configuration next to its log.",
        )  # fmt: skip
    if step_rules.hidden_by_the_gap(run):
        yield Missing(
            "a row for each update",
            "How far do updates move the policy, apart from the sampler's gap?",
            "Remove the gap first.",
        )
    elif step_rules.one_update(run) is None:
        what = "a row for each update" if run.per_batch(KL) or run.per_batch(ENTROPY) else f"{KL}, or entropy"
        yield Missing(
            what, "Is the learning rate too large?", "TRL: logging_steps=1; verl: actor.calculate_entropy=True."
        )


def _signal(run: Evidence) -> Iterator[Missing]:
    """Yields what the rules on the training signal and on harm lacked."""
    if not run.per_batch(EQUAL):
        seen = " Only batches without any gradient were seen." if run.per_batch(GRADIENT) else ""
        yield Missing(
            EQUAL_REWARDS, f"Which share of the groups has a learning signal?{seen}",
            "Log the share of groups with equal rewards.",
        )  # fmt: skip
    if not run.per_batch(ENTROPY):
        yield Missing("entropy", "Did the entropy collapse or explode?", "verl: actor.calculate_entropy=True.")
    longest = run.per_batch(LONGEST)
    if not run.per_batch(CUT) and not (run.per_batch(AT_LIMIT) and longest and middle(longest) >= signal_rules.LONG):
        yield Missing(
            CUT,
            "Does the length limit cut the completions?",
            "Log the share of completions that reach the length limit without an end.",
        )
    if len(run.evaluations) < 2:
        yield Missing(
            "evaluations", "Did the held-out accuracy fall? The reward of the training batches decided.",
            "Evaluate before and after training, with a known number of problems.",
        )  # fmt: skip
    if first_and_last(run.per_batch(REWARD), 10) is None:
        yield Missing(
            "six batches with a reward", "Did reward or entropy collapse, and do groups have equal rewards at the end?",
            "A window of fewer than three batches shows nothing: train longer, or log every batch.",
        )  # fmt: skip

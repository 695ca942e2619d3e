"""Diagnosis of one run: applies every rule, ranks the causes, and lists what the files of the run could not show."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trustrl.errors import RecordError, TrustRLError
from trustrl.runs.metric_names import AT_LIMIT, CUT, LONGEST
from trustrl.runs.open_run import open_run
from trustrl.runs.run import Missing, Run, no_completions
from trustrl.runs.run_verdict import FEWEST_ROLLOUTS, NO_METRICS
from trustrl.tools.explain import completion_rules, sampler_rules, signal_rules, step_rules
from trustrl.tools.explain.causes import ACCURACY, ORDERS, Cause, Number
from trustrl.tools.explain.evidence import (
    CLIPPED,
    ENTROPY,
    EQUAL,
    GAP,
    GRADIENT,
    KL,
    LOSS,
    MASKED,
    RATIO,
    REWARD,
    Evidence,
    Point,
    first_and_last,
    middle,
    origin,
    points,
)
from trustrl.tools.explain.recorded_gap import GapClass, classes_of
from trustrl.tools.probe import EXACT

EQUAL_REWARDS = "groups with identical rewards"
BOTH_LOGPROBS = (
    "Log the sampler's log-probs and the trainer's at the rollout's weights (TRL: use_vllm with "
    "vllm_importance_sampling_correction; verl: rollout.calculate_log_probs=True and no bypass_mode)."
)


@dataclass(frozen=True, slots=True)
class Check:
    """A rule, the causes it may name, and the metrics of which it needs one."""

    rule: Callable[[Evidence], Cause | None]
    looks_for: str
    metrics: tuple[str, ...] = ()
    """Empty for a rule on completions."""

    batches: int = 2 * FEWEST_ROLLOUTS
    """Fewest batches for its windows: the first ones and the last ones."""

    def had_data(self, evidence: Evidence) -> bool:
        """Returns whether the run has enough of the data that the rule reads."""
        if not self.metrics:
            return bool(evidence.sampled)
        if self.metrics == (ACCURACY,):
            return len(evidence.evaluations) > 1
        return any(len(evidence.per_batch(metric)) >= self.batches for metric in self.metrics)


CHECKS = (
    Check(signal_rules.non_finite_values, "non-finite values", (LOSS, GRADIENT, REWARD), 1),
    Check(completion_rules.lost_rewards, "lost rewards"),
    Check(completion_rules.duplicated_data, "duplicated data"),
    Check(completion_rules.reward_hacking, "reward contradicts held-out accuracy", (ACCURACY,)),
    Check(completion_rules.length_hacking, "length hacking", (ACCURACY,)),
    Check(signal_rules.completions_cut_off, "completions cut off", (CUT, AT_LIMIT)),
    Check(sampler_rules.stale_replica, "stale replica", (sampler_rules.STALE,), 1),
    Check(sampler_rules.stale_weights, "stale weights", (GAP,)),
    Check(sampler_rules.truncated_support, "truncated support", (RATIO,), 1),
    Check(sampler_rules.wrong_from_the_start, "wrong temperature or other weights", (GAP,), 1),
    Check(step_rules.learning_rate_too_large, "learning rate too large", (KL, CLIPPED, ENTROPY)),
    Check(step_rules.too_many_updates, "too many updates per batch", (MASKED, KL, CLIPPED)),
    Check(signal_rules.no_learning_signal, "no learning signal", (EQUAL, GRADIENT)),
    Check(signal_rules.entropy_collapse, "entropy collapse", (ENTROPY,)),
    Check(completion_rules.length_collapse, "length collapse", (completion_rules.LENGTH,)),
    Check(signal_rules.entropy_explosion, "entropy explosion", (ENTROPY,)),
)
"""Each rule looks for one cause, independently of the others."""

RANKING = "Causes come before symptoms; each group is ordered by confidence, a score and not a probability."

CURVES = {"entropy change": ENTROPY}
"""Metric to draw for a number that no row holds."""


@dataclass(frozen=True)
class Explanation:
    """Likely causes of a failed run, and what its files could not show."""

    evidence: Evidence
    causes: list[Cause]
    """Most likely first. Empty if no rule applies."""

    checked: list[str]
    """Causes that the rules looked for and had metrics to find."""

    unchecked: list[Missing]
    unread: str = ""
    """Reason that rules on completions were left out: a file that cannot be read. Empty if there is none."""

    @property
    def run(self) -> Run:
        """The run. It has no completions if they cannot be read."""
        return self.evidence.run

    @cached_property
    def gap(self) -> list[GapClass]:
        """Classes of recorded tokens with their shares of the sampler-trainer gap. Empty without records."""
        return classes_of(self.evidence.first_tokens)

    def curve(self, number: Number) -> list[Point]:
        """Returns the values over the steps among which the number stands. Empty if the run did not log them."""
        if number.metric == ACCURACY:
            return points(self.run.evaluations, "accuracy")
        return points(self.evidence.rows, CURVES.get(number.metric, number.metric))

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `trustrl explain --json` prints."""
        return {
            "run": self.run.path,
            "source": self.run.source,
            "read": list(self.run.found),
            "findings": [cause.to_dict() for cause in self.causes],
            "gap": [asdict(gap_class) for gap_class in self.gap],
            "checked": self.checked,
            "unchecked": [asdict(missing) for missing in self.unchecked],
        }

    def causes_text(self) -> str:
        """Formats the causes for the terminal, one paragraph each. Without causes, lists the checks."""
        if not self.causes:
            return f"nothing found. Checked: {', '.join(self.checked) or 'nothing, since no metric was logged'}."
        paragraphs = [self._paragraph(place, cause) for place, cause in enumerate(self.causes, 1)]
        return "\n\n".join([*paragraphs, *([RANKING] if len(self.causes) > 1 else [])])

    def _paragraph(self, place: int, cause: Cause) -> str:
        lines = [f"{place}. {cause.name} ({cause.kind}, confidence {cause.confidence:.2f})"]
        lines += [f"   change: {cause.change.words()}"] if cause.change else []
        lines += [f"   {cause.reason}"]
        for number in cause.numbers:
            metric = number.metric if number.source is None else f"{number.metric}, by {number.source},"
            lines += [f"   - {metric} {number.words}", f"     {number.row}; healthy: {number.healthy}"]
        look = self.look(cause)
        return "\n".join([*lines, f"   fix: {cause.action}", *([f"   read: {look}"] if look else [])])

    def look(self, cause: Cause) -> str:
        """Returns the completions and tokens to read for a cause, or an empty text if the run has none."""
        has = ["completions"] * (self.run.completions is not no_completions) + ["tokens"] * bool(self.run.records)
        return f"{' and '.join(has)} of step {cause.step}, {ORDERS[cause.read_by]} first" if has else ""

    def text(self) -> str:
        """Formats the causes for the terminal, the list of what was not checked, and the files that were read."""
        parts = [self.causes_text()]
        if self.unchecked:
            missing = [f"- {missing.what}: {missing.would_tell} {missing.how}" for missing in self.unchecked]
            parts.append("\n".join(["not checked:", *missing]))
        if self.run.found:
            parts.append("\n".join(["read:", *(f"- {finding}" for finding in self.run.found)]))
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
    evidence, unread = Evidence(run), ""
    try:
        _ = evidence.sampled
    except (TrustRLError, OSError) as error:  # rules on metrics need no completions
        evidence, unread = Evidence(replace(run, completions=no_completions)), str(error)
    causes = [cause for check in CHECKS if (cause := check.rule(evidence)) is not None]
    causes = [replace(cause, numbers=tuple(_traced(run, x) for x in cause.numbers)) for cause in causes]
    checked = [check.looks_for for check in CHECKS if check.had_data(evidence)]
    return Explanation(evidence, sorted(causes, key=lambda cause: cause.rank), checked, _unchecked(evidence), unread)


def _traced(run: Run, number: Number) -> Number:
    """Returns a number with the file of its row, and the logged metrics that it was computed from."""
    file = number.file or (run.evaluations_in if number.metric == ACCURACY else run.rows_in)
    return replace(number, source=origin(run.rows, number.metric), file=file)


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
    if middle(gaps) > EXACT and run.first_tokens is None:
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

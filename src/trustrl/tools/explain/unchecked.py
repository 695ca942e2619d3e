"""Causes that the files of a run could not show, and what would have shown them."""

from collections.abc import Iterator
from dataclasses import replace

from trustrl.runs.metric_names import AT_LIMIT, CUT, LONGEST
from trustrl.runs.run import Missing
from trustrl.tools.explain.evidence import Evidence, first_and_last, middle
from trustrl.tools.explain.metric_sources import (
    ENTROPY,
    EQUAL,
    GAP,
    GRADIENT,
    KL,
    RATIO,
    REWARD,
)
from trustrl.tools.explain.recorded_gap import tokens_of
from trustrl.tools.explain.sampler_rules import HALF_PRECISION, is_exact
from trustrl.tools.explain.signal_rules import LONG
from trustrl.tools.explain.step_rules import hidden_by_the_gap, one_update
from trustrl.tools.probe import EXACT

EQUAL_GROUPS = "groups with identical rewards"
BOTH = "Log the sampler's log-probs and the trainer's at the rollout's weights (TRL: use_vllm with "
BOTH += "vllm_importance_sampling_correction; verl: rollout.calculate_log_probs=True and no bypass_mode)."


def unchecked(run: Evidence) -> list[Missing]:
    """Returns everything that rules lacked, the reader's findings first."""
    entries = {missing.what: missing for missing in run.run.missing}
    if run.per_batch(EQUAL):  # verl's advantages show it too
        entries.pop(EQUAL_GROUPS, None)
    for missing in (*_gap(run), *_steps(run), *_signal(run)):
        known = entries.get(missing.what)  # the reader knows the trainer's setting
        entries[missing.what] = missing if known is None else replace(missing, how=known.how)
    return list(entries.values())


def _gap(run: Evidence) -> Iterator[Missing]:
    """Yields what the rules on the sampler lacked."""
    gaps = run.per_batch(GAP)
    if not gaps:
        yield Missing(
            "sampler-trainer mismatch",
            "Does the sampler have stale weights, another temperature, or another head?",
            BOTH,
        )
        return
    if not run.per_batch(RATIO):
        yield Missing(RATIO, "Does the sampler truncate the distribution?", BOTH)
    if EXACT < middle(gaps) <= HALF_PRECISION and not is_exact(run) and _dtype_unknown(run):
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
    if hidden_by_the_gap(run):
        yield Missing(
            "a row for each update",
            "How far do updates move the policy, apart from the sampler's gap?",
            "Remove the gap first.",
        )
    elif one_update(run) is None:
        what = "a row for each update" if run.per_batch(KL) or run.per_batch(ENTROPY) else f"{KL}, or entropy"
        yield Missing(
            what, "Is the learning rate too large?", "TRL: logging_steps=1; verl: actor.calculate_entropy=True."
        )


def _signal(run: Evidence) -> Iterator[Missing]:
    """Yields what the rules on the training signal and on harm lacked."""
    if not run.per_batch(EQUAL):
        seen = " Only batches without any gradient were seen." if run.per_batch(GRADIENT) else ""
        yield Missing(
            "groups with identical rewards", f"Which share of the groups has a learning signal?{seen}",
            "Log the share of groups with equal rewards.",
        )  # fmt: skip
    if not run.per_batch(ENTROPY):
        yield Missing("entropy", "Did the entropy collapse or explode?", "verl: actor.calculate_entropy=True.")
    longest = run.per_batch(LONGEST)
    if not run.per_batch(CUT) and not (run.per_batch(AT_LIMIT) and longest and middle(longest) >= LONG):
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


def _dtype_unknown(run: Evidence) -> bool:
    return None in (run.run.settings.trainer_dtype, run.run.settings.sampler_dtype)

"""Diagnostic rules for the gap between sampler and trainer at the same weights, over all tokens and by replica.

k = π'/μ and Δ = log k, over tokens that μ sampled. If both are the same policy, Δ is rounding. The onset and the sign
of the gap separate the causes. If the run has records, they separate a wrong temperature from wrong weights, and show
which tokens carry the gap.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from trustrl.engines.common import replica_gaps
from trustrl.errors import MissingPackageError
from trustrl.optional_imports import need
from trustrl.runs.run import Run
from trustrl.runs.run_verdict import FEWEST_ROLLOUTS
from trustrl.tools.explain.causes import Cause, Number, Order, confidence
from trustrl.tools.explain.changes import Change, no_truncation, same_temperature
from trustrl.tools.explain.evidence import ENTROPY, GAP, LARGEST_RATIO, RATIO, Evidence, Point, middle, onset, points
from trustrl.tools.explain.recorded_gap import at_the_start, line_of, sentence_of
from trustrl.tools.probe import EXACT, WHAT_TO_DO

HALF_PRECISION = 0.04
"""Largest mean |Δ| in nats of a healthy half-precision sampler: the upper end of the metric dictionary's range."""

HALF_PRECISION_STARTS = 0.01
"""Lower end of that range: the smallest gap whose growth counts."""

GROWTH = 5.0
"""Growth factor of a gap that stale weights cause. Rounding changes little while a policy sharpens."""

ONE_SIDED = 0.5
"""Shortfall of the mean of k below 1, as a share of the mean |Δ|. If μ covers the support of π', k averages 1."""

HALF_OF_THE_MASS = math.log(2)
"""Largest mean |Δ| that truncation causes: a sampler keeps at least half of the mass, so Δ ≥ −log 2."""

ABOVE_ONE = 1.5
"""Largest k under truncation, where only rounding exceeds 1. TRL masks larger ratios, which lowers their mean too."""

LEFT_BEHIND = 2.0
"""Growth factor of a gap that exists from the start. That of a temperature shrinks with the entropy."""

UNSEEN = 0.5
"""Factor on the confidence when temperature and weights are separated without recorded tokens."""

STALE, LARGEST = "trustrl/stale_replicas", "trustrl/replica_gap_max"
"""Metrics that engines log: the number of replicas that stand out, and the largest mean gap of a replica."""

REPLICA_FILES = 512
"""Number of files to read of each table, newest first: a replica that is stale at the end of a run is in them."""

REPLICA_TOKENS = 1_000_000
"""Tokens after which no further file is read."""

FEW_FILES = 8
"""Number of files that show whether the records name replicas at all."""

_COMPARED = ("step", "update", "sequence", "policy_logp", "behavior_logp", "sampler_version")

ACTION = (
    "Restart the replica, or send the weights to it again, and resume from a checkpoint before that step. Set "
    "on_stale_replica='raise' to stop a run at this point."
)

STOP = Change("on_stale_replica", "raise")

Gaps = dict[int, dict[str, tuple[float, int]]]
"""Mean |Δ| of each replica and the number of its tokens, by step."""


def stale_weights(run: Evidence) -> Cause | None:
    """Detects weights that do not reach the sampler: a gap that is absent at the first batch and present later."""
    gaps = run.per_batch(GAP)
    later = gaps[len(gaps) // 2 :]
    if len(later) < FEWEST_ROLLOUTS or len(later) == len(gaps):
        return None
    limit = max(EXACT if is_exact(run) else HALF_PRECISION_STARTS, GROWTH * gaps[0][1])
    if gaps[0][1] > gap_limit(run) or middle(later) <= limit or _one_sided(run):
        return None
    numbers = (
        Number(
            GAP, onset(gaps, limit, "above"), middle(later), limit, "above", "median of the batches in the second half"
        ),
    )
    where = sentence_of(run.last_tokens)
    return Cause(
        "stale weights", Order.SAMPLER, confidence(numbers),
        f"Sampler and trainer agreed at the first batch ({gaps[0][1]:.2g} nats) but no longer do. {where}",
        numbers, "Sync the trainer's weights to the sampler after every batch, and check that they arrive.",
        read_by="gap",
    )  # fmt: skip


def truncated_support(run: Evidence) -> Cause | None:
    """Detects top-p or top-k in the sampler.

    Truncation renormalizes μ over fewer ids, so π' ≤ μ at every token: Δ has one sign and k averages below 1.
    """
    ratios, gaps = run.per_batch(RATIO), run.per_batch(GAP)
    if not _one_sided(run):
        return None
    numbers = (
        Number(RATIO, ratios[0][0], middle(ratios), 1 - EXACT, "below", "median over batches"),
        Number(GAP, gaps[0][0], middle(gaps), EXACT, "above", "median over batches"),
    )
    share = min(1.0, _shortfall(run) / middle(gaps))
    return Cause(
        "truncated support", Order.SAMPLER, confidence(numbers[1:]),
        f"The trainer assigns tokens lower probability than the sampler, and almost never higher: the mean ratio falls "
        f"short of 1 by {share:.0%} of the mean gap. {sentence_of(run.first_tokens)}",
        numbers, WHAT_TO_DO["truncation"], no_truncation(run.run), "gap",
    )  # fmt: skip


def gap_limit(run: Evidence) -> float:
    """Returns the largest healthy mean |Δ|: that of half precision unless both sides are known to be float32."""
    return EXACT if is_exact(run) else HALF_PRECISION


def is_exact(run: Evidence) -> bool:
    """Returns whether both sides are known to compute in float32."""
    return run.run.settings.trainer_dtype == run.run.settings.sampler_dtype == "float32"


def wrong_from_the_start(run: Evidence) -> Cause | None:
    """Detects a gap that exists from the first batch: another temperature, or other weights if no setting explains it.

    For a temperature, records show that the gap is linear in log μ. Without records, its size must be possible for one:
    the KL of a colder sampler to the trainer's policy is at most that policy's entropy, and shrinks with it. Other
    weights are often in the output layer.
    """
    gaps = run.per_batch(GAP)
    if not gaps or _one_sided(run) or min(gaps[0][1], middle(gaps)) <= EXACT:
        return None
    tokens = run.first_tokens
    line = line_of(tokens)
    # Rounding does not produce a line, so with one the gap is real even below half-precision noise.
    limit = EXACT if line is not None and line.is_temperature else gap_limit(run)
    if min(gaps[0][1], middle(gaps)) <= limit:
        return None
    numbers = (Number(GAP, gaps[0][0], gaps[0][1], limit, "above", "at the first batch"),)
    if line is not None:
        temperature, sure = line.is_temperature, confidence(numbers)
        how = (
            f"a line over log μ with slope {line.slope:.2f} explains {line.explained:.0%} of the gap "
            f"({line.tokens:,} recorded tokens)"
        )
    else:
        temperature, how = _by_size(run, gaps)
        sure = UNSEEN * confidence(numbers)
    name, fix = ("wrong temperature", "temperature") if temperature else ("tied head not synced", "weights")
    if not temperature and at_the_start(tokens) is not None:
        return Cause(
            "wrong chat template", Order.SAMPLER, sure,
            f"Sampler and trainer disagree at the first tokens: they read different prompts. {sentence_of(tokens)}",
            numbers, "Give both the same prompt: one chat template, and special tokens added once.", read_by="gap",
        )  # fmt: skip
    reason = f"Sampler and trainer disagree from the first batch: {how}. {sentence_of(tokens)}"
    change = same_temperature(run.run, None if line is None else 1 + line.slope) if temperature else None
    return Cause(name, Order.SAMPLER, sure, reason, numbers, WHAT_TO_DO[fix], change, "gap")


def _by_size(run: Evidence, gaps: list[Point]) -> tuple[bool, str]:
    """Returns whether a temperature can make the gap, and the reason, from metrics alone."""
    entropies = run.per_batch(ENTROPY)
    if not entropies:
        return False, "the policy's entropy is unknown, so a temperature cannot be told from other weights"
    if gaps[0][1] > entropies[0][1]:
        return False, "the gap is beyond the policy's entropy (the run has no records)"
    later = gaps[len(gaps) // 2 :]
    if len(later) >= FEWEST_ROLLOUTS and middle(later) > LEFT_BEHIND * gaps[0][1]:
        return False, f"the gap grows to {middle(later):.2g} nats (the run has no records)"
    return True, "the gap is within the policy's entropy (the run has no records)"


def _shortfall(run: Evidence) -> float:
    """Returns the shortfall of the mean of k below 1."""
    ratios = run.per_batch(RATIO)
    return 1 - middle(ratios) if ratios else 0.0


def _one_sided(run: Evidence) -> bool:
    short, gaps, largest = _shortfall(run), run.per_batch(GAP), run.per_batch(LARGEST_RATIO)
    if not gaps or (largest and middle(largest) > ABOVE_ONE):
        return False
    return short > EXACT and ONE_SIDED * middle(gaps) <= short and middle(gaps) <= HALF_OF_THE_MASS


def stale_replica(run: Evidence) -> Cause | None:
    """Detects a replica whose gap stands out from the others' at the same step, or from its own earlier ones."""
    gaps = _recorded_gaps(run.run)
    history, first = replica_gaps.ReplicaGaps(), dict[str, tuple[int, replica_gaps.StaleReplica]]()
    for step in sorted(gaps):
        for replica in history.stale(gaps[step]):
            first.setdefault(replica.name, (step, replica))
    if first:
        numbers = tuple(
            Number(
                LARGEST,
                step,
                replica.gap,
                max(replica_gaps.RATIO * replica.usual, replica_gaps.SMALLEST_GAP),
                "above",
                f"replica {name}",
                file="token records",
            )
            for name, (step, replica) in first.items()
        )
        total = len({name for step in gaps.values() for name in step})
        names = ", ".join(f"{name} (from step {step})" for name, (step, _) in first.items())
        reason = (
            f"{len(first)} of {total} replicas did not follow the trainer's weights: {names}. The sampler's log-probs "
            "of its tokens are not those of the trainer at the same weights."
        )
        return Cause("stale replica", Order.SAMPLER, confidence(numbers), reason, numbers, ACTION, STOP, "gap")
    flagged = [point for point in points(run.rows, STALE) if point[1] > 0]
    if not flagged:
        return None
    step, count = flagged[0]
    numbers = (Number(STALE, step, count, 0.0, "above", f"first of {len(flagged)} logged steps"),)
    reason = "The engine found a replica that did not follow the trainer's weights. The run's log names it."
    return Cause("stale replica", Order.SAMPLER, confidence(numbers), reason, numbers, ACTION, STOP, "gap")


def _recorded_gaps(run: Run) -> Gaps:
    """Returns the gaps in the run's records; empty without records that name replicas, or without pyarrow.

    The first update compares sampler and trainer at the same weights, on tokens that are as new as the trainer.
    """
    from trustrl.recording.sequence_tables import read_sequences

    sums: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    try:
        for folder in run.records:
            names: Any = None
            for newest in (FEW_FILES, REPLICA_FILES):  # a sampler names its replicas in all files or in none
                names = read_sequences(folder, newest=newest).select(["sequence", "replica"]).drop_null()
                if not len(names):
                    break
            for table in _newest_tokens(folder) if len(names) else ():
                for row in _gap_sums(table, names).to_pylist():
                    entry = sums[row["step"]][row["replica"]]
                    entry[0] += row["gap_sum"]
                    entry[1] += row["gap_count"]
    except MissingPackageError:
        return {}
    return {
        step: {name: (total / count, int(count)) for name, (total, count) in replicas.items()}
        for step, replicas in sums.items()
    }


def _newest_tokens(folder: str) -> Iterator[Any]:
    """Yields token tables of the newest files, up to `REPLICA_TOKENS` rows."""
    from trustrl.recording.record_files import part_files, read_table

    room = REPLICA_TOKENS
    for file in reversed(part_files(folder)[-REPLICA_FILES:]):
        if room <= 0:
            return
        table, _ = read_table(file, _COMPARED)
        room -= len(table)
        yield table


def _gap_sums(table: Any, names: Any) -> Any:
    """Returns `gap_sum` and `gap_count` of each step and replica."""
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    gap = pc.abs(pc.subtract(*(pc.cast(table[name], pa.float64()) for name in ("policy_logp", "behavior_logp"))))
    same = pc.and_(pc.equal(table["update"], 0), pc.equal(table["sampler_version"], table["step"]))
    replica = names["replica"].take(pc.index_in(table["sequence"], value_set=names["sequence"]))
    compared = pc.and_(pc.and_(same, pc.is_finite(gap)), pc.is_valid(replica))
    columns = pa.table({"step": table["step"], "replica": replica, "gap": gap}).filter(compared)
    return columns.group_by(["step", "replica"]).aggregate([("gap", "sum"), ("gap", "count")])

"""Diagnostic rule for a replica of the sampler that does not follow the trainer, by records or by logged metrics."""

from collections import defaultdict

from trustrl.engines.common.replica_gaps import RATIO, SMALLEST_GAP, ReplicaGaps, StaleReplica
from trustrl.errors import MissingPackageError
from trustrl.runs.run import Run
from trustrl.tools.explain.causes import Cause, Number, Order, confidence
from trustrl.tools.explain.evidence import Evidence, points

STALE, LARGEST = "trustrl/stale_replicas", "trustrl/replica_gap_max"
"""Metrics that engines log: the number of replicas that stand out, and the largest mean gap of a replica."""

FILES = 512
"""Number of record files to read, newest first: a replica that is stale at the end of a run is in them."""

ACTION = (
    "Restart the replica, or send the weights to it again, and resume from a checkpoint before that step. Set "
    "on_stale_replica='raise' to stop a run at this point."
)

Gaps = dict[int, dict[str, tuple[float, int]]]
"""Mean |Δ| of each replica and the number of its tokens, by step."""


def stale_replica(run: Evidence) -> Cause | None:
    """Detects a replica whose gap stands out from the others' at the same step, or from its own earlier ones."""
    gaps = recorded_gaps(run.run)
    history, first = ReplicaGaps(), dict[str, tuple[int, StaleReplica]]()
    for step in sorted(gaps):
        for replica in history.stale(gaps[step]):
            first.setdefault(replica.name, (step, replica))
    if first:
        numbers = tuple(
            Number(LARGEST, step, replica.gap, max(RATIO * replica.usual, SMALLEST_GAP), "above", f"replica {name}")
            for name, (step, replica) in first.items()
        )
        total = len({name for step in gaps.values() for name in step})
        names = ", ".join(f"{name} (from step {step})" for name, (step, _) in first.items())
        reason = (
            f"{len(first)} of {total} replicas did not follow the trainer's weights: {names}. The sampler's log-probs "
            "of its tokens are not those of the trainer at the same weights."
        )
        return Cause("stale replica", Order.SAMPLER, confidence(numbers), reason, numbers, ACTION)
    flagged = [point for point in points(run.rows, STALE) if point[1] > 0]
    if not flagged:
        return None
    step, count = flagged[0]
    numbers = (Number(STALE, step, count, 0.0, "above", f"first of {len(flagged)} logged steps"),)
    reason = "The engine found a replica that did not follow the trainer's weights. The run's log names it."
    return Cause("stale replica", Order.SAMPLER, confidence(numbers), reason, numbers, ACTION)


def recorded_gaps(run: Run) -> Gaps:
    """Returns the gaps in the run's records; empty without records that name replicas, or without pyarrow.

    The first update compares sampler and trainer at the same weights, on tokens that are as new as the trainer.
    """
    from trustrl.recording.record_files import part_files
    from trustrl.recording.record_reader import read
    from trustrl.recording.sequence_tables import read_sequences

    sums: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    try:
        for folder in run.records:
            rows = read_sequences(folder).select(["sequence", "replica"]).drop_null().to_pydict()
            names = dict(zip(*rows.values(), strict=True))
            for file in part_files(folder)[-FILES:] if names else ():
                part = read(file)
                if not {"behavior_logp", "sampler_version"} <= {*part}:
                    continue
                gap = (part["policy_logp"].double() - part["behavior_logp"].double()).abs()
                compared = (part["update"] == 0) & (part["sampler_version"] == part["step"]) & gap.isfinite()
                columns = (part["step"], part["sequence"], gap)
                for step, sequence, value in zip(*(x[compared].tolist() for x in columns), strict=True):
                    if sequence in names:
                        entry = sums[step][names[sequence]]
                        entry[0] += value
                        entry[1] += 1
    except MissingPackageError:
        return {}
    return {
        step: {name: (total / count, int(count)) for name, (total, count) in replicas.items()}
        for step, replicas in sums.items()
    }

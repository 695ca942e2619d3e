"""Power failures of a run that `trustrl run` does not manage: two ranks record, and resume from a checkpoint.

python -m failures.record_crashes --crashes 1000    checks them; prints one JSON object

The trace has a first process of both ranks and a second one, which resumed. The engine's checkpoints are taken to be on
the disk as soon as they are written. After each crash both ranks resume from the newest one and record one step.
"""

import argparse
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from failures.crash_states import Crash, Trace, crashes, recorded
from trustrl import PolicyTokens, RolloutTokens
from trustrl.errors import RecordError, TrustRLWarning
from trustrl.recording import Recorder, Recording, SequenceRows, compaction, rank_writer, read, read_sequences

RANKS, STEPS, EVERY, RESUMED = 2, 12, 4, 8
"""Ranks, steps, steps between checkpoints, and the checkpoint from which the second process continues."""

BLOCKS = (2, 4)
"""Steps that are merged into one file: few, so that the trace has merges."""


class Engine:
    """Its checkpoints."""

    name = ""

    def saved(self, step: int) -> None:
        """Marks the moment at which the checkpoint of a step exists."""
        self.name = str(step)


def _record(folder: Path, steps: range, engine: Any = None, *, synced: bool = True) -> None:
    """Records steps on both ranks in one process, and syncs the record before each checkpoint."""
    settings = Recording(folder=folder, sample=1.0, ring_steps=0, triggers=(), text=True)
    ranks = [Recorder(settings, None, rank=rank, run="a" * 32, world_size=RANKS) for rank in range(RANKS)]
    try:
        for step in steps:
            for rank, recorder in enumerate(ranks):
                _record_step(recorder, step, rank)
            if engine is not None and (step + 1) % EVERY == 0:
                for recorder in ranks:
                    if synced:
                        recorder.sync()
                engine.saved(step + 1)
    finally:
        for recorder in ranks:
            if recorder._writer is not None:
                recorder._writer.wait()


def _record_step(recorder: Recorder, step: int, rank: int) -> None:
    draw = torch.Generator().manual_seed(10 * step + rank)
    logp = -torch.rand(2, 3, generator=draw, dtype=torch.float32)
    rollout = RolloutTokens(
        behavior_logp=logp - 0.1, advantage=torch.ones(2, 3), in_loss=torch.ones(2, 3, dtype=torch.bool)
    )
    ids = [1000 * step + 10 * rank, 1000 * step + 10 * rank + 1]
    rows = SequenceRows(sequence=ids, completion=[f"answer {number}" for number in ids])
    recorder.add_sequences(rows, step=step)
    recorder.add(None, PolicyTokens(logp=logp), rollout, sequences=torch.tensor(ids), step=step)
    recorder.end_step(step, None)


def tables(folder: Path, before: int) -> list[dict[str, list[Any]]]:
    """Returns the tokens and the sequences of the steps before one, in order."""
    read_tables = []
    for table in (read(folder).table, read_sequences(folder).drop_columns("text")):
        order = [(name, "ascending") for name in ("step", "rank", "sequence", "position") if name in table.column_names]
        rows = table.sort_by(order).to_pylist()
        read_tables.append([row for row in rows if row["step"] < before])
    return read_tables


def outcome(state: Path, crash: Crash, trace: Trace, whole: list[Any]) -> tuple[str, str]:
    """Resumes a state and reads its record: exact, said (an error or a warning names the loss) or silent."""
    marks = [(at, int(label.rpartition(" ")[2])) for at, label, _ in trace.marks]
    step = max((saved for at, saved in marks if at <= crash.point), default=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", TrustRLWarning)
        try:
            _record(state / "records", range(step, step + 1))
            seen = tables(state / "records", min(step + 1, STEPS))
        except (RecordError, OSError) as error:
            return "said", str(error)
    expected = [[row for row in rows if row["step"] <= step] for rows in whole]
    if seen == expected:
        return "exact", ""
    return ("said", str(said[0].message)) if said else ("silent", f"checkpoint {step}")


def traced(folder: Path, *, synced: bool = True) -> Trace:
    """Returns the trace of two processes of both ranks; the second one resumes."""
    folder.mkdir(parents=True)
    engine = Engine()
    with recorded(folder, {"saved": (Engine, "saved", dict)}) as trace:
        _record(folder / "records", range(RESUMED + 2), engine, synced=synced)
        _record(folder / "records", range(RESUMED, STEPS), engine, synced=synced)
    return trace


def outcomes(scratch: Path, number: int, *, synced: bool = True) -> Iterator[tuple[Crash, str, str]]:
    """Yields crashes, each with its outcome and what was said."""
    before = compaction.BLOCKS, rank_writer.BLOCKS
    compaction.BLOCKS = rank_writer.BLOCKS = BLOCKS
    try:
        trace = traced(scratch / "traced", synced=synced)
        whole = tables(scratch / "traced" / "records", STEPS)
        for crash in crashes(trace, number):
            crash.write(scratch / "state")
            yield crash, *outcome(scratch / "state", crash, trace, whole)
    finally:
        compaction.BLOCKS, rank_writer.BLOCKS = before


def main() -> int:
    """Checks crashes, and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crashes", type=int, default=1000)
    parser.add_argument("--without-sync", action="store_true", help="Do not sync before checkpoints.")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        for crash, kind, said in outcomes(Path(scratch), options.crashes, synced=not options.without_sync):
            counts[kind] += 1
            if kind != "exact":
                print(crash.point, crash.way, kind, said[:300], flush=True)
    print(json.dumps(counts))
    return int("silent" in counts)


if __name__ == "__main__":
    raise SystemExit(main())

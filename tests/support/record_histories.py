"""Random histories of a record: processes that start, resume on other ranks, overlap and die between any two calls.

python tests/support/record_histories.py --histories 500    checks them; prints one JSON object

A model of a few lines says what a reader may find: a step of a rank is what the last process recorded whose claim took
effect at or before that step. A kill leaves several possibilities; the reader must find one of them, whole.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from support import recording_batches as batches
from trustrl.errors import RecordError, TrustRLWarning
from trustrl.recording import Recorder, Recording, compaction, rank_writer, read
from trustrl.recording.record_check import check_record

CALLS = ("replace", "link", "unlink", "fsync", "mkdir", "rmdir")
"""Functions of `os` before or after which a process may die."""

BLOCKS = (2, 4)
RUN = "a" * 32
BATCH = batches.batch(rows=2, length=3)
TOKENS = int(BATCH.rollout.in_loss.sum())


class Killed(BaseException):
    """The process is dead. Not an Exception, so that nothing handles it."""


class Kill:
    """Ends the current process at its nth call. A dead process makes no further call, not even to clean up."""

    def __init__(self) -> None:
        self.left = -1
        self.after = self.dead = False
        self._real = {name: getattr(os, name) for name in CALLS}

    @contextmanager
    def armed(self, calls: int, *, after: bool):
        self.left, self.after, self.dead = calls, after, False
        for name in CALLS:
            setattr(os, name, self._wrapped(self._real[name]))
        try:
            yield
        finally:
            for name in CALLS:
                setattr(os, name, self._real[name])

    def _wrapped(self, real):
        def call(*arguments, **more):
            if self.dead:
                raise Killed
            self.left -= 1
            if self.left == 0 and not self.after:
                self.dead = True
                raise Killed
            result = real(*arguments, **more)
            if self.left == 0:
                self.dead = True
                raise Killed
            return result

        return call


class Inline:
    """Pool that merges files at once, so that a kill inside is a kill of the process."""

    def __init__(self, *_, **__) -> None: ...

    def submit(self, work, *arguments):
        done = Future()
        try:
            done.set_result(work(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done


class History:
    """One folder, its processes, and the states in which a reader may find each rank."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw = random.Random(seed)
        self.folder = folder
        self.kill = Kill()
        self.states: dict[int, list[tuple[object, dict[int, int]]]] = {}
        """By rank: the owner, and the first sequence id by step."""
        self.recorded: set[int] = set()
        """First ids of all steps that were acknowledged."""
        self.next_id = 0
        self.counts: Counter[str] = Counter()
        self.launch: dict[int, Recorder] = {}
        self.zombies: list[tuple[int, Recorder, int]] = []
        self.step = 0

    def run(self, actions: int) -> Counter[str]:
        self.start()
        for _ in range(actions):
            action = self.draw.choices((self.record, self.start, self.zombie, self.foreign), (6, 2, 2, 0.5))[0]
            action()
            self.check()
        checked = check_record(self.folder)
        errors = [finding for finding in checked.findings if finding.level == "error"]
        empty = not self._seen() and all("got none" in finding.text for finding in errors)  # all of it is superseded
        assert checked.is_valid or empty, errors[:3]
        self.counts["superseded files"] += checked.superseded
        return self.counts

    # ── what processes do ───────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Starts the run, or resumes it at an earlier step, on other ranks; the processes before die, or do not."""
        world = self.draw.choice((1, 2, 3, 4))
        for rank, old in self.launch.items():
            if self.draw.random() < 0.4:
                self.zombies.append((rank, old, self.step))
        self.step = max(0, self.step - self.draw.choice((0, 0, 1, 2, 3, 5)))
        self.launch = {}
        for rank in range(world):
            ring = self.draw.choice((0, 0, 2))
            settings = Recording(folder=self.folder, sample=1.0, ring_steps=ring, triggers=())
            self.launch[rank] = Recorder(settings, batches.REGION, rank=rank, run=RUN, world_size=world)
        self.counts["starts"] += 1

    def record(self) -> None:
        """Records a step on every rank of the launch, in any order. One of them may die."""
        ranks = list(self.launch)
        self.draw.shuffle(ranks)
        doomed = self.draw.choice(ranks) if ranks and self.draw.random() < 0.5 else None
        for rank in ranks:
            calls = self.draw.randint(1, 30) if rank == doomed else 0
            if not self._end(rank, self.launch[rank], self.step, calls):
                del self.launch[rank]
        self.step += 1

    def zombie(self) -> None:
        """Lets a process of an earlier launch record its next step."""
        if self.zombies:
            rank, made, step = self.zombies.pop(self.draw.randrange(len(self.zombies)))
            calls = self.draw.randint(1, 20) if self.draw.random() < 0.3 else 0
            if self._end(rank, made, step, calls):
                self.zombies.append((rank, made, step + 1))
            self.counts["steps of overlapping processes"] += 1

    def foreign(self) -> None:
        """Another run in the same folder is refused."""
        settings = Recording(folder=self.folder, ring_steps=0, triggers=())
        try:
            Recorder(settings, batches.REGION, rank=self.draw.randrange(4), run="b" * 32)
        except RecordError:
            self.counts["foreign runs refused"] += 1
        else:
            raise AssertionError("a foreign run was let in")

    def _end(self, rank: int, made: Recorder, step: int, calls: int) -> bool:
        """Records one step. Returns False if the process is dead or has stopped recording."""
        first, self.next_id = self.next_id, self.next_id + 2
        begins = made._writer is None
        killed = False
        with self.kill.armed(calls, after=self.draw.random() < 0.5), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", TrustRLWarning)
            try:
                made.add_sequences(batches.sequence_rows(range(first, first + 2)), step=step)
                made.add(BATCH.out, BATCH.policy, BATCH.rollout, sequences=torch.tensor([first, first + 1]), step=step)
                begun = True
                made.end_step(step, None)
            except Killed:
                killed = True
                begun = made._writer is not None
        if begins:
            self._began(rank, made, step, certain=begun and made._writer is not None)
        if killed:
            self.counts["kills"] += 1
            self._possible(rank, lambda owner, steps: (owner, steps | {step: first}) if owner is made else None)
            return False
        if made._stopped:
            assert said, "recording stopped without a word"
            self.counts["processes stopped"] += 1
            return False
        self.states[rank] = [(owner, steps | {step: first}) for owner, steps in self._of(rank) if owner is made]
        assert self.states[rank], f"rank {rank}, step {step}: acknowledged although another process has the rank"
        self.recorded.add(first)
        self.counts["steps"] += 1
        return True

    # ── what a reader may find ──────────────────────────────────────────────────────────────────────────────────────

    def _of(self, rank: int) -> list[tuple[object, dict[int, int]]]:
        return self.states.setdefault(rank, [(None, {})])

    def _began(self, rank: int, made: Recorder, step: int, *, certain: bool) -> None:
        world = made._claim.world_size
        others = [other for other in self.states if other >= world]
        for other, owner in [(rank, made), *((other, "retired") for other in others)]:

            def after(before, steps, owner=owner, other=other):
                if owner == "retired" and before == "retired" and not any(late >= step for late in steps):
                    return before, steps
                return owner, {early: first for early, first in steps.items() if early < step}

            if certain:
                self.states[other] = [after(*state) for state in self._of(other)]
            else:
                self._possible(other, after)

    def _possible(self, rank: int, change) -> None:
        states = self._of(rank)
        self.states[rank] = states + [new for state in states if (new := change(*state)) is not None]

    def check(self) -> None:
        """Compares what a reader finds with the possible states, and keeps those that agree."""
        seen = self._seen()
        visible = set()
        for rank in {*self.states, *seen}:
            own = seen.get(rank, {})
            agreeing = [state for state in self._of(rank) if state[1] == own]
            assert agreeing, f"rank {rank}: read {own}, expected one of {[steps for _, steps in self._of(rank)]}"
            self.states[rank] = agreeing
            visible |= set(own.values())
        dropped = self.recorded - visible
        kept = self._set_aside()
        assert dropped <= kept, f"tokens are gone: {sorted(dropped - kept)[:5]}"
        self.counts["checks"] += 1

    def _seen(self) -> dict[int, dict[int, int]]:
        """Returns the first id by rank and step, from the rows alone."""
        try:
            table = read(self.folder).table
        except RecordError as error:
            assert "No records found" in str(error), error
            return {}
        rows = Counter(zip(*(table[name].to_pylist() for name in ("rank", "step", "sequence")), strict=True))
        ids: dict[tuple[int, int], set[int]] = {}
        for rank, step, sequence in rows:
            ids.setdefault((rank, step), set()).add(sequence)
        total: Counter[tuple[int, int]] = Counter()
        for (rank, step, _), num in rows.items():
            total[rank, step] += num
        found: dict[int, dict[int, int]] = {}
        for (rank, step), both in ids.items():
            first = min(both)
            assert both == {first, first + 1}, f"rank {rank}, step {step}: mixed sequences {sorted(both)}"
            assert total[rank, step] == TOKENS, f"rank {rank}, step {step}: {total[rank, step]} tokens"
            found.setdefault(rank, {})[step] = first
        return found

    def _set_aside(self) -> set[int]:
        """Returns the first ids of all token files that exist, read or not."""
        import pyarrow.parquet as pq

        files = [*self.folder.glob("step-*.parquet"), *(self.folder / "superseded").glob("step-*.parquet")]
        return {first for file in files for first in pq.read_table(file, columns=["sequence"])["sequence"].to_pylist()}


@contextmanager
def small_blocks():
    """Merges every two and four steps, at once."""
    before = compaction.BLOCKS, rank_writer.BLOCKS, rank_writer.ThreadPoolExecutor
    compaction.BLOCKS = rank_writer.BLOCKS = BLOCKS
    rank_writer.ThreadPoolExecutor = Inline
    try:
        yield
    finally:
        compaction.BLOCKS, rank_writer.BLOCKS, rank_writer.ThreadPoolExecutor = before


def run(seeds, actions: int = 12) -> Counter[str]:
    """Checks a history for each seed. Returns counts of what happened in them."""
    counts: Counter[str] = Counter()
    with small_blocks():
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    counts += History(seed, Path(folder) / "records").run(actions)
                except BaseException as error:
                    error.add_note(f"history with seed {seed}")
                    raise
            counts["histories"] += 1
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--histories", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(run(range(options.first, options.first + options.histories))))

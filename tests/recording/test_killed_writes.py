"""A recorder that is killed inside its writes, with half of the bytes written, and started again.

One process makes all kills in forks: a library in its LD_PRELOAD ends a fork at a given call on the record's files.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

pytest.importorskip("pyarrow")
if sys.platform != "linux" or shutil.which("cc") is None:
    pytest.skip("the library needs Linux and a C compiler", allow_module_level=True)

from failures.faults import compiled

from support.rendezvous import python_path
from trustrl.recording import read, read_sequences, read_texts

STEPS, KILLS = 3, 24
SCRIPT = """
import ctypes, json, os, sys
from pathlib import Path
from failures.faults import at_call, calls_in, counting
from failures.forked import in_fork
from support import recording_batches as batches
from trustrl.recording import Recorder, Recording
steps, kills, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

def record(folder, first, faults):
    os.environ.update(faults)
    ctypes.CDLL(None).failures_arm()
    recorder = Recorder(Recording(folder=folder, sample=1.0, text=True), batches.REGION, rank=0)
    for step in range(first, steps):
        recorder.add_sequences(batches.sequence_rows(range(8 * step, 8 * step + 8)), step=step)
        batches.give(recorder, batches.batch(seed=step, first=8 * step), step=step)

log = root / "calls.log"
assert in_fork(lambda: record(root / "whole", 0, counting(str(root / "whole"), log))) == 0
total = len(calls_in(log))
for at in sorted({1 + one * (total - 1) // (kills - 1) for one in range(kills)}):
    folder = root / f"killed-{at}"
    code = in_fork(lambda: record(folder, 0, at_call(str(folder), at, "tear", root / "log")))
    parts = sorted(one.name for one in folder.glob("step-*.parquet"))
    (root / f"left-{at}").mkdir()
    for name in parts:
        (root / f"left-{at}" / name).write_bytes((folder / name).read_bytes())
    again = in_fork(lambda: record(folder, min(len(parts), steps - 1), {}))
    print(json.dumps({"at": at, "hit": calls_in(root / "log")[-1], "code": code, "parts": parts, "again": again}))
"""


@pytest.fixture(scope="module")
def kills(tmp_path_factory):
    """(folder, one description per kill)."""
    folder = tmp_path_factory.mktemp("kills")
    environment = {**os.environ, "LD_PRELOAD": str(compiled(folder))}
    environment["PYTHONPATH"] = os.pathsep.join([python_path(), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(STEPS), str(KILLS), str(folder)], env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, [json.loads(line) for line in done.stdout.splitlines()]


def contents(folder):
    """The tables, without the names of text files, which say which process wrote them."""
    return read(folder).table, read_sequences(folder).drop_columns("text"), read_texts(folder)


def test_the_kills_were_inside_writes_of_every_table(kills):
    _, made = kills
    assert len(made) >= 20
    assert {kill["code"] for kill in made} == {-signal.SIGKILL}
    assert sum(" write " in kill["hit"] for kill in made) >= 15
    assert all(any(table in kill["hit"] for kill in made) for table in ("/texts/", "/sequences/", "/.step-"))


def test_a_kill_inside_a_write_leaves_whole_steps_and_nothing_of_the_step_in_progress(kills):
    folder, made = kills
    for kill in made:
        assert kill["parts"] == [f"step-{step:08d}.rank-0000.parquet" for step in range(len(kill["parts"]))]
        for name in kill["parts"]:
            assert read(folder / f"left-{kill['at']}" / name).table.equals(read(folder / "whole" / name).table)
    assert {len(kill["parts"]) for kill in made} >= set(range(STEPS))


def test_a_recorder_that_is_started_again_records_the_same_and_removes_unfinished_files(kills):
    folder, made = kills
    for kill in made:
        assert kill["again"] == 0
        again, whole = contents(folder / f"killed-{kill['at']}"), contents(folder / "whole")
        assert all(one.equals(other) for one, other in zip(again, whole, strict=True)), kill
        assert not list((folder / f"killed-{kill['at']}").rglob(".*")), kill

"""Records in an S3 server on this machine that fails, hangs or answers late: what a step waits for, and what is lost."""

import os
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("fsspec")

from support import recording_batches as batches
from support.failing_s3 import environment, failing_s3
from trustrl.cli import main
from trustrl.errors import ConfigError, TrustRLWarning
from trustrl.recording import NonFinite, Recorder, Recording, read, read_sequences, read_texts, spool, storage, uploads
from trustrl.recording.record_check import check_record


@pytest.fixture
def server(monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(uploads, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(uploads, "LONGEST_WAIT", 0.05)
    storage._resolved.cache_clear()
    with failing_s3() as made:
        yield made


@pytest.fixture
def make(tmp_path):
    """Recorders whose files wait below `tmp_path`. They end with the test and do not wait for the store."""
    made = []

    def recorder(folder, **more):
        usual = {"sample": 1.0, "ring_steps": 2, "triggers": (NonFinite(at_most_every=1),), "spool": tmp_path / "spool"}
        made.append(Recorder(Recording(folder=folder, **usual | more), batches.REGION, rank=0))
        return made[-1]

    yield recorder
    for one in made:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if one._uploads is not None:
                one._uploads.end(0.0)


def record(recorder, step, **more):
    """One step. Returns its seconds."""
    b = batches.batch(seed=step, first=8 * step, **more)
    before = time.perf_counter()
    recorder.add_sequences(batches.sequence_rows(range(8 * step, 8 * step + 8)), step=step)
    batches.give(recorder, b, step=step)
    return time.perf_counter() - before


@contextmanager
def texts():
    """Warnings in the block, as a list of their texts."""
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TrustRLWarning)
        yield said
    said += [str(warning.message) for warning in caught]


def valid(address):
    report = check_record(address)
    assert report.is_valid, report.findings
    return report


@pytest.mark.parametrize("mode", ["down", "hang", "lost"])
def test_recording_goes_on_after_an_outage_and_the_record_is_that_of_a_folder(server, make, tmp_path, mode):
    address = server.address("run/records")
    remote, local = make(address), make(tmp_path / "local")
    with texts() as said:
        for step in range(8):
            if step == 2:
                remote.flush()
                server.turn(mode)
            bad = {(0, 0): float("-inf")} if step == 4 else {}  # a trigger fires during the outage
            assert record(remote, step, at=bad) < 2.0
            record(local, step, at=bad)
            if step == 6:
                time.sleep(0.5 if mode != "hang" else 0.0)
                server.turn("up")
        remote.flush(30.0)
    assert not any("lack" in text for text in said), said
    if mode == "down":
        begin, end = said
        assert "Cannot upload records to `s3://bucket/run/records`" in begin
        assert "takes records again after" in end
    assert read(address).table.equals(read(tmp_path / "local").table)
    assert read_sequences(address).equals(read_sequences(tmp_path / "local"))
    assert read_texts(address).equals(read_texts(tmp_path / "local"))
    dump = address.replace("records?", "records/dump-00000004?")
    assert read(dump).table.equals(read(tmp_path / "local" / "dump-00000004").table)
    assert valid(address).rows == valid(tmp_path / "local").rows
    assert not list((tmp_path / "spool").rglob("*.parquet"))


def test_a_server_that_answers_late_costs_no_step_its_latency(server, make):
    remote = make(server.address("run/records"))
    server.turn("late")
    server.seconds = 0.3
    slow = [record(remote, step) for step in range(5)]
    assert sorted(slow)[2] < 0.25, slow  # a step makes three requests, and the first one three more
    server.turn("up")
    remote.flush()
    assert set(read(server.address("run/records"))["step"].tolist()) == set(range(5))


def test_a_full_spool_drops_whole_steps_and_counts_them_exactly(server, make):
    address = server.address("run/records")
    remote = make(address, spool_bytes=20_000)
    server.turn("down")
    added = {}
    with texts() as said:
        for step in range(30):
            record(remote, step)
            added[step] = int(batches.batch(seed=step).rollout.in_loss.sum())
            if step == 19:
                server.turn("up")
            if step >= 19:
                remote.flush(60.0)
    written = read(address)["step"].tolist()
    lost = set(added) - set(written)
    assert 0 < len(lost) < 20
    assert lost == set(range(min(lost), 20)), "whole steps, until there was room again"
    totals = [text for text in said if "lack" in text]
    sequences = 240 - len(read_sequences(address))
    tokens = sum(added[step] for step in lost)
    assert len(written) + tokens == sum(added.values())
    assert totals == [
        f"Records in `s3://bucket/run/records` lack {tokens:,} tokens and {sequences} sequences of {len(lost)} steps, "
        f"{min(lost)} to 19, until the run ended."
    ]
    assert sum("the spool `" in text for text in said) == 1
    valid(address)
    assert len(remote.ring.steps()) == 2


def test_what_an_ended_process_left_is_uploaded_by_the_next_one_or_by_the_command(server, make, tmp_path, capsys):
    address = server.address("run/records")
    first = make(address)
    for step in range(3):
        record(first, step)
    first.flush()
    server.turn("down")
    second = make_during_an_outage(server, make, address)
    with texts() as said:
        for step in range(2, 5):
            record(second, step)
        second.flush(0.5)
    option = ["--spool", str(tmp_path / "spool")]
    assert "lacks 10 files" in said[-1]
    assert f"`trustrl records upload s3://bucket/run/records {' '.join(option)}`" in said[-1]
    kill(second)
    stranger = second._uploads._own / "notes.txt"
    stranger.write_text("of somebody else")
    server.turn("up")
    third = make(address)
    record(third, 4)
    third.flush()
    assert set(read(address)["step"].tolist()) == {0, 1, 2, 3, 4}
    assert stranger.read_text() == "of somebody else"
    server.turn("down")
    with texts() as said:
        record(third, 5)
        third.flush(0.5)
    assert "lacks 3 files" in said[-1]
    assert main(["records", "upload", address, *option]) == 1
    assert "belongs to a process that runs" in capsys.readouterr().out
    kill(third)
    server.turn("up")
    assert main(["records", "upload", address, *option]) == 0
    assert "3 files uploaded, 0 left" in capsys.readouterr().out
    assert set(read(address)["step"].tolist()) == {0, 1, 2, 3, 4, 5}
    valid(address)


def make_during_an_outage(server, make, address):
    """A recorder that started before the outage and has not recorded a step."""
    server.turn("up")
    made = make(address)
    server.turn("down")
    return made


def kill(recorder):
    """Ends the uploads of a recorder as the end of its process does: the thread stops and the lock is free."""
    with recorder._uploads._changed:
        recorder._uploads._ends = True
        recorder._uploads._changed.notify_all()
        thread = recorder._uploads._thread
    if thread is not None:
        thread.join(30.0)
    recorder._uploads._lock.close()
    recorder._uploads._process = -1  # the exit of this process does nothing for it


SCRIPT = """
import sys, warnings
from support import recording_batches as batches
from trustrl.recording import Recorder, Recording, uploads
uploads.FLUSH_SECONDS = float(sys.argv[4])
address, spool, port = sys.argv[1:4]
recorder = Recorder(Recording(folder=address, sample=1.0, spool=spool), batches.REGION, rank=0)
batches.give(recorder, batches.batch(), step=0)
recorder.flush(30.0)
import urllib.request
urllib.request.urlopen(port)
for step in (1, 2):
    batches.give(recorder, batches.batch(seed=step), step=step)
print("trained")
"""


def run_script(server, spool, monkeypatch, *, mode, seconds=1.0, until=None):
    """Runs the script, which asks for the outage itself, so that no clock decides. It ends `until` seconds later."""
    from support.failing_s3 import _Handler

    before = _Handler._answer

    def turned(self):
        if self.path == "/turn":
            server.turn(mode)
            if until is not None:
                threading.Timer(until, server.turn, ("up",)).start()
            return self._reply(200, b"")
        return before(self)

    monkeypatch.setattr(_Handler, "do_GET", turned)
    port = f"http://127.0.0.1:{server._http.server_port}/turn"
    ended = subprocess.run(
        [sys.executable, "-W", "always", "-c", SCRIPT, server.address("run/records"), str(spool), port, str(seconds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
    return ended.stderr


def test_a_process_that_exits_during_a_short_outage_uploads_what_it_recorded_last(server, tmp_path, monkeypatch):
    said = run_script(server, tmp_path / "spool", monkeypatch, mode="down", seconds=60.0, until=2.0)
    assert "lacks" not in said, said
    assert set(read(server.address("run/records"))["step"].tolist()) == {0, 1, 2}
    assert not list((tmp_path / "spool").rglob("*.parquet"))


@pytest.mark.parametrize("mode", ["down", "hang"])
def test_a_process_ends_in_time_while_the_store_fails_and_says_what_waits(server, tmp_path, mode, monkeypatch):
    address = server.address("run/records")
    began = time.monotonic()
    assert "lacks 2 files of this record" in run_script(server, tmp_path / "spool", monkeypatch, mode=mode)
    assert time.monotonic() - began < 120
    server.turn("up")
    assert main(["records", "upload", address, "--spool", str(tmp_path / "spool")]) == 0
    assert set(read(address)["step"].tolist()) == {0, 1, 2}


def test_spools_of_records_in_different_stores_are_apart(tmp_path):
    def name(address):
        return spool.spool_of(storage.place(address), tmp_path).name

    plain = "s3://bucket/run/records?scheme=http&region=us-east-1&endpoint_override="
    keyed = plain.replace("s3://", "s3://key:secret@")
    assert name(plain + "a:1") == name(keyed + "a:1") != name(plain + "b:1")
    assert name(plain + "a:1") != name(plain.replace("run/", "run2/") + "a:1")


def test_a_usual_spool_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "gettempdir", lambda: str(tmp_path))
    where = storage.place("memory://run/records")
    assert spool.spool_of(where).parent.parent == tmp_path
    assert spool.spool_of(where).parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(spool, "_user", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=r"got another user's\. Set recording\.spool"):
        spool.spool_of(where)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"spool": "s3://bucket/spool"}, "recording.spool must be a local path or None"),
        ({"spool": 3}, "recording.spool must be a local path or None"),
        ({"spool_bytes": 0}, "recording.spool_bytes"),
    ],
)
def test_a_spool_must_be_local_and_hold_something(settings, says):
    with pytest.raises(ConfigError, match=says):
        Recording(folder="records", **settings)


def test_records_in_a_folder_have_nothing_to_upload(tmp_path, capsys):
    assert main(["records", "upload", str(tmp_path)]) == 2
    assert "must be in an object store" in capsys.readouterr().err

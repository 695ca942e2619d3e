"""`trustrl watch`: follows a run that another process writes, and ends with it or at Ctrl-C."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.run_folders import run_folder, steps
from trustrl.cli import main
from trustrl.errors import ConfigError
from trustrl.tools.report.live_view import live_reports, stamp

PATIENCE = 120
"""Seconds: the machine may be busy with something else."""

WRITER = """
import json, sys, time
from pathlib import Path
from trustrl.runner.directory import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
for line in sys.stdin:
    row = json.loads(line)
    if row["step"] < 0:
        run.finish({"name": "small", "seconds": 1.0})
    else:
        run.append("metrics", row)
"""
"""Process that writes a run, one row for each line it is given."""


def started(*command, **more):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([sys.executable, *command], text=True, env=environment, **more)


def watch(*arguments, **more):
    code = "from trustrl.cli import console; console()"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    return started("-c", code, "watch", *map(str, arguments), **pipes)


def until(condition):
    """Waits for a condition that another process makes true."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def read_until(stream, words):
    """Reads lines up to one with these words."""
    for line in stream:
        if words in line:
            return line
    raise AssertionError(f"the output ended without {words!r}")


def test_a_run_that_another_process_writes_is_followed_to_its_end(tmp_path):
    folder, out = run_folder(tmp_path / "a", rows=steps(8)[:1], evaluations=(), finished=False), tmp_path / "live.html"
    writer = started("-c", WRITER, str(folder), stdin=subprocess.PIPE)
    process = watch(folder, "--every", 0.1, "--out", out)
    try:
        read_until(process.stdout, "small: unfinished, step 1 of 8")
        assert 'id="live" data-seconds="0.1"' in until(lambda: out.exists() and out.read_text(encoding="utf-8"))
        for row in steps(8)[1:4]:
            print(json.dumps(row), file=writer.stdin, flush=True)
        read_until(process.stdout, "small: unfinished, step 4 of 8")
        until(lambda: "unfinished, step 4 of 8" in out.read_text(encoding="utf-8"))
        print(json.dumps({"step": -1}), file=writer.stdin, flush=True)
        read_until(process.stdout, "small: finished, step 4 of 8")
        assert process.wait(PATIENCE) == 0
    finally:
        for one in (writer, process):
            one.kill()
            one.communicate()
    assert 'id="live"' not in out.read_text(encoding="utf-8")  # the last page no longer reloads


def test_ctrl_c_ends_it_with_a_page_that_no_longer_reloads(tmp_path):
    folder, out = run_folder(tmp_path / "a", finished=False), tmp_path / "new" / "live.html"
    # A shell's background job ignores Ctrl-C, and so would all processes that it starts.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    process = watch(folder, "--every", 0.1, "--out", out, **heard)
    try:
        read_until(process.stdout, "small: unfinished")
        until(lambda: out.exists() and 'id="live"' in out.read_text(encoding="utf-8"))
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.communicate()
    assert 'id="live"' not in out.read_text(encoding="utf-8")


def test_a_terminal_is_redrawn_in_place_and_keeps_the_last_text(tmp_path):
    pytest.importorskip("rich")
    folder = run_folder(tmp_path / "a")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from trustrl.cli import console; console()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "watch", str(folder)], stdout=theirs, stderr=subprocess.PIPE, env=environment
    ) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                said += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
        assert process.wait(PATIENCE) == 0
    inside, after = said.split(b"\x1b[?1049l")
    assert b"\x1b[?1049h" in inside  # the alternate screen
    assert b"Ctrl-C ends" in inside
    assert b"small: finished, step 8 of 8" in after


def test_a_failed_run_ends_with_1(tmp_path, capsys):
    folder = run_folder(tmp_path / "a", rows=steps(8)[:2], finished=False)
    (tmp_path / "a.log").write_text("error: out of memory\n")
    assert main(["watch", str(folder)]) == 1
    assert "small: failed, step 2" in capsys.readouterr().out


@pytest.mark.parametrize("every", ["0", "-1", "nan", "inf"])
def test_an_interval_that_is_not_positive_ends_with_2(every, tmp_path, capsys):
    assert main(["watch", str(run_folder(tmp_path / "a")), "--every", every]) == 2
    assert "--every must be a positive number" in capsys.readouterr().err


def test_a_run_that_does_not_exist_ends_with_2(capsys):
    assert main(["watch", "nowhere"]) == 2
    assert "must be a folder or file that exists" in capsys.readouterr().err


class Stop(Exception):
    pass


def reports(folder, *between):
    """Steps of the reports, with an action at each pause."""
    actions, pauses, found = list(between), [], []

    def sleep(seconds):
        pauses.append(seconds)
        if not actions:
            raise Stop
        actions.pop(0)()

    with suppress(Stop):
        for report in live_reports([str(folder)], every=0.5, with_page=False, sleep=sleep):
            found.append(report.runs[0].run.steps)
    return found, pauses


def test_a_report_is_made_only_when_a_file_has_changed(tmp_path):
    folder = run_folder(tmp_path / "a", rows=steps(8)[:1], finished=False)

    def more():
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(steps(8)[1]) + "\n")

    found, pauses = reports(folder, lambda: None, more, lambda: None)
    assert found == [1, 2]
    assert min(pauses) >= 0.5


def test_an_empty_folder_is_waited_for_and_said_once(tmp_path, capsys):
    folder = tmp_path / "a"
    folder.mkdir()

    def begun():
        made = run_folder(tmp_path / "b", rows=steps(8)[:1], finished=False)
        for file in made.iterdir():
            file.rename(folder / file.name)

    found, _ = reports(folder, (folder / "x").touch, begun)
    assert found == [1]
    assert capsys.readouterr().err.count("waiting: RUN must be a run in a known format") == 1


def test_reading_takes_at_most_a_tenth_of_a_core(tmp_path, monkeypatch):
    folder = run_folder(tmp_path / "a", finished=False)
    from trustrl.tools.report import live_view

    clock = iter([0.0, 7.0])
    monkeypatch.setattr(live_view.time, "process_time", lambda: next(clock))
    _, pauses = reports(folder)
    assert pauses == [pytest.approx(63.0)]


def test_a_path_that_is_missing_is_refused_at_once():
    with pytest.raises(ConfigError, match="exists"):
        next(live_reports(["nowhere"], every=1.0, with_page=False))


def test_the_stamp_sees_files_below_a_folder_and_the_log_next_to_it(tmp_path):
    folder = run_folder(tmp_path / "a")
    before = stamp([str(folder)])
    (tmp_path / "a.log").write_text("error: no\n")
    (folder / "records").mkdir()
    (folder / "records" / "x").write_text("1")
    new = {Path(name).name for name in set(stamp([str(folder)])) - set(before)}
    assert new == {"a.log", "x"}

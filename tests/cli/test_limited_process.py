"""The child process of commands that read files: what ends at a limit ends with a sentence."""

import os
import signal
import subprocess
import sys
import time

import pytest

from support.run_folders import run_folder, steps
from trustrl.cli import limited_process

linux = pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")

COMMAND = """
import sys, time, os
from trustrl import cli
from trustrl.cli import limited_process
limited_process.SECONDS, limited_process.WALL = {seconds}, {wall}
def main(arguments=None):
    {body}
    return 0
cli.main = {main}
sys.argv = ["trustrl", *{words}]
cli.console()
"""


def started(body="pass", *, main="main", words=("report", "nowhere"), seconds=60, wall=5, **more):
    code = COMMAND.format(body=body, main=main, words=list(words), seconds=seconds, wall=wall)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def ended(*arguments, **more):
    process = started(*arguments, **more)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@linux
@pytest.mark.parametrize(
    ("body", "limits", "words"),
    [
        ("while True: pass", {"seconds": 0}, "Reading takes more than 1 CPU seconds."),
        ("time.sleep(600)", {"seconds": 0, "wall": 2}, "Reading takes more than 2 seconds."),
        ("os.abort()", {}, "The process that read the files ended by SIGABRT."),
    ],
    ids=["cpu", "wall", "abort"],
)
def test_a_limit_ends_the_command_with_a_sentence(body, limits, words):
    code, out, err = ended(body, **limits)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {words}")
    assert err.endswith("Set TRUSTRL_READ_LIMITS=2 to read it all the same.\n")
    assert err.count("\n") == 1


@linux
def test_memory_is_limited_in_the_child_and_the_message_says_how_to_raise_it(tmp_path):
    """The real `main`, with a reader that takes 3 GB."""
    body = "raise SystemExit"
    grab = "lambda a=None, real=cli.main: (setattr(__import__('trustrl.runs.open_run').runs.open_run, 'open_run', lambda p: bytearray(3 * 10**9)), real())[1]"
    words = ("explain", str(run_folder(tmp_path / "a")))
    code, out, err = ended(body, main=grab, words=words)
    assert (code, out) == (1, "")
    assert err == (
        f"error: Reading takes more memory than the {1_700_000_000 + 2**24 * os.cpu_count():,} bytes allowed. Set "
        "TRUSTRL_READ_LIMITS=2 to read it all the same.\n"
    )


@linux
def test_other_verbs_and_clusters_run_in_the_process_itself():
    body = "print(os.getpid())"
    for words, is_child in ((("report", "x"), True), (("run", "x"), False), (("audit", "--ray", "x"), False)):
        process = started(body, words=words)
        out, _ = process.communicate(timeout=300)
        assert (int(out) != process.pid) == is_child


@linux
def test_the_code_of_the_child_is_the_code_of_the_command():
    assert ended("sys.exit(7)")[0] == 7


@linux
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_child_ends_with_its_parent(how):
    process = started("print(os.getpid(), flush=True); time.sleep(600)")
    child = int(process.stdout.readline())
    process.send_signal(how)
    process.wait(60)
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{child}") and "State:\tZ" not in _status(child):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.communicate()


def _status(process):
    try:
        with open(f"/proc/{process}/status") as file:
            return file.read()
    except OSError:
        return "State:\tZ"


def test_a_factor_that_is_none_is_refused():
    code, _, err = ended(TRUSTRL_READ_LIMITS="many")
    assert code == 2
    assert err == "error: TRUSTRL_READ_LIMITS must be a number above 0 and up to 1,000,000, got 'many'.\n"


def test_the_time_grows_with_the_input(tmp_path):
    run_folder(tmp_path / "a", rows=steps(2000))
    assert limited_process._size([str(tmp_path / "a"), "--json"]) > 100_000
    (tmp_path / "b.db").write_bytes(b"x" * 9000)
    assert limited_process._size([f"{tmp_path / 'b.db'}::run"]) >= 9000
    assert limited_process._size(["s3://bucket/run"]) is None

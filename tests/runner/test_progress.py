"""Progress on stderr: plain lines, or a bar on a terminal that has rich."""

import io
import sys

import pytest

from trustrl.cli import main
from trustrl.errors import MissingPackageError
from trustrl.runner import recipe_files
from trustrl.runner.processes import Progress
from trustrl.runner.recipe import load
from trustrl.runner.run_recipe import run
from trustrl.world import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that `time.perf_counter` returns; the test sets the first entry."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def steps(shown, clock, seconds, first, last):
    for step in range(first, last + 1):
        clock[0] += seconds
        shown.step({"step": step, "reward": step / 10, "trustrl/masked_share": None, "entropy": 1.0})


def test_plain_lines_come_every_five_seconds_and_at_both_ends(clock):
    stream = io.StringIO()
    with Progress("run", 10, stream) as shown:
        shown.log("held-out accuracy 0.250 at step 0")
        steps(shown, clock, 2.0, 1, 10)
    assert stream.getvalue().splitlines() == [
        "run: held-out accuracy 0.250 at step 0",
        "run: step 1 of 10, reward 0.100, entropy 1.000",
        "run: step 4 of 10, reward 0.400, entropy 1.000, 12 s left",
        "run: step 7 of 10, reward 0.700, entropy 1.000, 6 s left",
        "run: step 10 of 10, reward 1.000, entropy 1.000, 0 s left",
    ]


def test_the_time_left_of_a_resumed_run_counts_only_the_steps_it_made(clock):
    stream = io.StringIO()
    with Progress("run", 100, stream) as shown:
        steps(shown, clock, 6.0, 91, 92)
    assert stream.getvalue().splitlines()[-1].endswith("step 92 of 100, reward 9.200, entropy 1.000, 48 s left")


def test_a_terminal_without_rich_gets_plain_lines(clock, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setitem(sys.modules, "rich", None)
    stream = Terminal()
    with Progress("run", 2, stream) as shown:
        steps(shown, clock, 1.0, 1, 2)
    assert stream.getvalue().splitlines()[0] == "run: step 1 of 2, reward 0.100, entropy 1.000"
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_bar_that_is_closed_after_an_error_and_leaves_stdout_alone(clock, monkeypatch, capsys):
    pytest.importorskip("rich", reason='needs "trustrl[run]"')
    monkeypatch.setenv("TERM", "xterm")
    stream, stdout = Terminal(), sys.stdout

    def interrupted():
        with Progress("run", 40, stream) as shown:
            steps(shown, clock, 1.0, 5, 6)
            shown.log("a line in [brackets]")
            assert sys.stdout is stdout
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    text = stream.getvalue()
    hidden, visible = "\x1b[?25l", "\x1b[?25h"
    assert text.count(hidden) == text.count(visible) == 1
    assert text.index(hidden) < text.rindex(visible), "the cursor is visible again"
    assert "6/40" in text
    assert "34 s left" in text
    assert "run: a line in [brackets]" in text
    assert capsys.readouterr().out == ""


def test_without_tomli_w_a_plan_works_and_a_recipe_cannot_be_written(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tomli_w", None)
    assert main(["plan", "tour"]) == 0
    capsys.readouterr()
    with pytest.raises(MissingPackageError, match=r'tomli_w is not installed.*pip install "trustrl\[run\]"'):
        recipe_files.dumps({"name": "run"})


def test_a_run_without_tomli_w_is_refused_before_its_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tomli_w", None)
    with pytest.raises(MissingPackageError, match=r"trustrl\[run\]"):
        run(load("tour"), tmp_path / "run", engine=lambda *_: pytest.fail("it was trained"))
    assert not (tmp_path / "run").exists()

"""The first completions of a run: read from its files once, and bounded in number and memory."""

from itertools import islice

import pytest

from support.explained_runs import run_of
from trustrl.errors import RecordError
from trustrl.runs import first_completions as module
from trustrl.runs.first_completions import read_once
from trustrl.runs.run import Completion, no_completions
from trustrl.tools.report.report_contents import gather


class Counted:
    """Completions that count how often a reader begins, and how many it takes."""

    def __init__(self, count):
        self.made = [Completion(step=step // 2, prompt="p", text="t" * 100) for step in range(count)]
        self.begun = self.taken = 0

    def __call__(self):
        self.begun += 1
        for completion in self.made:
            self.taken += 1
            yield completion


@pytest.mark.parametrize("bounds", [{}, {"max_points": 0, "max_shown": 0}], ids=["page", "text"])
def test_a_report_reads_them_once_for_the_causes_and_the_page(bounds):
    completions = Counted(300)
    report = gather([("a", run_of(completions=completions))], **bounds)
    assert (report.shown[0].num_known, bool(report.explained[0].evidence.sampled)) == (300, True)
    assert (completions.begun, completions.taken) == (1, 300)


def test_they_are_the_same_each_time_and_let_go_at_the_end():
    completions = Counted(10)
    with read_once(run_of(completions=completions)) as run:
        assert list(islice(run.completions(), 3)) == completions.made[:3]
        assert list(run.completions()) == list(run.completions()) == completions.made
    assert completions.begun == 1
    assert run.completions.kept is None


def test_those_that_do_not_fit_are_read_again(monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 5_000)
    completions = Counted(20)
    with read_once(run_of(completions=completions)) as run:
        assert list(run.completions()) == completions.made
        assert completions.begun == 1
        assert 1 <= len(run.completions.kept) < 10
        assert list(run.completions()) == completions.made
        assert completions.begun == 2


def test_later_ones_are_left_out(monkeypatch):
    monkeypatch.setattr(module, "MOST_COMPLETIONS", 7)
    completions = Counted(20)
    with read_once(run_of(completions=completions)) as run:
        assert len(list(run.completions())) == len(list(run.completions())) == 7
    assert completions.taken == 7


def test_a_run_without_any_stays_one_without_any():
    with read_once(run_of()) as run:
        assert run.completions is no_completions


def test_an_error_is_the_readers():
    def broken():
        yield Completion(step=1)
        raise RecordError("A file must be whole.")

    with read_once(run_of(completions=broken)) as run:
        for _ in range(2):
            with pytest.raises(RecordError, match="must be whole"):
                list(run.completions())

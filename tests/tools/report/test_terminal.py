"""The report in a terminal: short, true, and harmless on any terminal."""

import pytest

from support.run_folders import hostile_tokenizer, run_folder, steps, write_records
from trustrl.runs.open_run import open_runs
from trustrl.tools.report.report_contents import gather, sparkline, text


def of(*folders, unicode=True):
    return text(gather(open_runs(folders), max_points=0, max_shown=0), unicode=unicode)


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        pytest.param([0.0, 0.5, 1.0], "▁▅█", id="rising"),
        pytest.param([2.0, 2.0], "▁▁", id="flat"),
        pytest.param([1.0, None, 0.0], "█ ▁", id="a gap"),
        pytest.param([None], " ", id="nothing finite"),
        pytest.param([], "", id="nothing"),
    ],
)
def test_a_sparkline_goes_from_the_lowest_to_the_highest(values, drawn):
    assert sparkline(values) == drawn


def test_a_long_sparkline_has_means_of_neighbours():
    assert sparkline([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], width=3) == "▁▅█"


def test_a_finished_run_is_a_few_lines(tmp_path):
    said = of(run_folder(tmp_path / "a"))
    for words in (
        "small: finished, step 8 of 8, 12 s", "exceeds 0.15 (probability)", "25.0% → 75.0%", "▁▂▃▄▅▆▇█", "seed 0", "TRL",
    ):  # fmt: skip
        assert words in said
    assert len(said.splitlines()) < 20


def test_unfinished_failed_and_collapsed_runs_are_said_to_be(tmp_path):
    half = run_folder(tmp_path / "a", name="s-half", rows=steps(8)[:3], finished=False)
    failed = run_folder(tmp_path / "b", name="s-failed", rows=steps(8)[:2], finished=False)
    (tmp_path / "b.log").write_text("error: out of memory\n")
    fallen = run_folder(tmp_path / "c", name="s-fallen", evaluations=((0, 0.25), (8, 0.05)))
    said = of(half, failed, fallen)
    for words in (
        "s-half: unfinished, step 3 of 8",
        "s-failed: failed, step 2",
        "    error: out of memory",
        "COLLAPSED",
    ):
        assert words in said
    assert said.count("COLLAPSED") == 1


def test_the_reward_says_how_many_rollouts_it_is_of(tmp_path):
    rows = [row | {"reward": (row["step"] - 1) // 16 / 8} for row in steps(128)]
    said = of(run_folder(tmp_path / "a", rows=rows, updates=16))
    assert "▁▂▃▄▅▆▇█  0 → 0.875, highest 0.875 (8 rollouts)" in said


def test_a_run_without_anything_is_still_said(tmp_path):
    assert "unfinished, step 0 of 8" in of(run_folder(tmp_path / "a", rows=[], evaluations=(), finished=False))


def test_numbers_that_were_never_finite_are_said_to_be(tmp_path):
    rows = [{"step": 1, "loss": None, "grad_norm": None}]
    said = of(run_folder(tmp_path / "a", rows=rows, evaluations=()))
    assert "never finite (L2), 1 not finite" in said
    assert "COLLAPSED" in said


def test_a_terminal_without_utf8_gets_ascii(tmp_path):
    said = of(run_folder(tmp_path / "a", region="troll"), unicode=False)
    assert said.isascii()
    assert "25.0% -> 75.0%" in said
    assert "KL(pi^||pi')" in said
    assert "_.-=+*#@" in said


def test_hostile_names_and_tokens_send_no_escape_sequences(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    hostile_tokenizer(monkeypatch, tmp_path)
    folder = run_folder(tmp_path / "a", name="run\x1b[2J\u202e", finished=False)
    (tmp_path / "a.log").write_text("error: \x1b]0;owned\x07\n")
    write_records(folder / "records", {"token_id": [0, 1, 2, 3, 4], "kept": [False] * 5})
    said = of(folder)
    assert not set("\x1b\x07\x00\u202e\ud800") & set(said)
    assert "5 masked" in said
    assert "\\x1b[2J\\x07" in said

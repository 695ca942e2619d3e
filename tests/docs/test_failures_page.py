"""The page of failures is what its command makes from the committed data, and its sentences hold for the data."""

import json
import shutil
from pathlib import Path

import pytest
from failures import page

ROOT = Path(__file__).parents[2]
DATA = json.loads(page.DATA.read_text())


def made(tmp_path, data):
    (tmp_path / "data.json").write_text(json.dumps(data))
    for name, file in (("page.md", page.PAGE), ("guide.md", page.GUIDE)):
        shutil.copy(file, tmp_path / name)
    page.write(tmp_path / "data.json", tmp_path / "page.md", tmp_path / "guide.md")
    return (tmp_path / "page.md").read_text()


def test_the_page_is_made_from_the_data(tmp_path):
    assert made(tmp_path, DATA) == page.PAGE.read_text()
    assert (tmp_path / "guide.md").read_text() == page.GUIDE.read_text()


def test_a_row_without_a_run_says_so(tmp_path):
    without = {name: row for name, row in DATA.items() if name != "trl-random"}
    assert "| TRL: SIGKILL at a random time | not run |" in made(tmp_path, without)


def test_no_row_of_the_data_is_missing_from_the_page():
    assert DATA.keys() <= {*page.ROWS, "power"}


def test_a_thousand_power_failures_lost_nothing_that_a_checkpoint_covers_and_nothing_silently():
    power = DATA["power"]
    assert sum(power["honest"].values()) >= 1000
    assert power["honest"].keys() <= {"exact", "finished"}
    assert "silent" not in power["lying"]
    assert len(power["resumed"]) >= 24
    assert [case for case in power["resumed"] if case["different"]] == []


def killed():
    return [
        pytest.param(case, id=f"{name}: {case['label']}")
        for name, row in DATA.items()
        if name.startswith("trl-")
        for case in row["cases"]
        if "lost_steps" in case
    ]


@pytest.mark.parametrize("case", killed())
def test_every_killed_run_of_trl_ended_bit_for_bit_within_the_bound(case):
    assert case["different"] == []
    assert case["unreadable"] == []
    assert case["resume_code"] == 0
    assert case["lost_steps"] <= 2
    assert case["lost_tokens"] <= case["lost_steps"] * 4 * 4 * 4


def test_at_least_a_hundred_kills_of_which_twenty_were_inside_a_write():
    assert len(killed()) >= 100
    writes = [row["cases"] for name, row in DATA.items() if name in ("trl-checkpoint-write", "trl-record-write")]
    assert sum(map(len, writes)) >= 20

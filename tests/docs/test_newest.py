"""The table of newest releases: its reading of pytest's output, and the page, which shows the recorded results."""

from pathlib import Path

import newest
import pytest

from trustrl.engines.catalogue import ENGINES

FAILED = """
E       AttributeError: 'Client' object has no attribute 'send'
=========================== short test summary info ============================
FAILED tests/engines/tinker/test_tinker.py::test_it[cispo] - AttributeError
2 failed, 3 passed, 1 warning in 1.50s
"""


@pytest.mark.parametrize(
    ("said", "cell", "broken"),
    [
        ("....\n4 passed, 1 skipped in 0.5s", "4 passed, 1 skipped", ""),
        (
            FAILED,
            "2 failed, 3 passed",
            "`test_tinker.py::test_it[cispo]`: AttributeError: 'Client' object has no attribute 'send'",
        ),
        ("", "did not start", ""),
    ],
)
def test_what_pytest_says_becomes_a_row(said, cell, broken):
    assert (newest.cell(said), newest.broken(said)) == (cell, broken)


def test_every_engine_that_has_releases_is_tried():
    released = {engine.package.replace("_", "-") for engine in ENGINES if not engine.versions[0].startswith("commit")}
    assert released <= {row.package for row in newest.ROWS}


def test_pinned_releases_are_those_of_the_environments():
    pinned = {row.package: newest.pinned(row) for row in newest.ROWS}
    assert "-" not in pinned.values()
    for engine in ENGINES:
        if engine.package in pinned:
            assert pinned[engine.package] == engine.versions[0]


def test_the_page_shows_the_recorded_results():
    inside = newest.PAGE.read_text().partition(newest.MARKERS[0])[2].partition(newest.MARKERS[1])[0]
    results = newest.recorded()
    assert results.keys() <= {row.name for row in newest.ROWS}
    assert inside.strip() == newest.table([*results.values()])


def test_raised_requirements_are_installed_and_torch_stays(monkeypatch):
    raised = ["mcp>=2.2 (here 2.0)", "torch==2.14.0 (here 2.13.0)", "torchvision==0.29.0 (here 0.28.0)"]
    commands = []
    monkeypatch.setattr(newest, "unmet", lambda python, package: raised)
    monkeypatch.setattr(newest, "uv", lambda *arguments: commands.append(arguments))
    newest.raise_requirements(Path("bin/python"), "vllm")
    assert commands == [("install", "--quiet", "--python", "bin/python", "--no-deps", "mcp>=2.2")]

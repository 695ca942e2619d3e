"""The resolution check's logic, on synthetic resolutions; `nox -s pins` runs it on the real index."""

import datetime
import re
import tomllib
from pathlib import Path

import environment_hashes
import pins
import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROW = pins.Row("engine 1.0", "gpu", ("engine[gpu]==1.0",), ("records", "ray"), "`engine`")
YES = pins.Resolution({"torch": "2.11.0"})
NO = pins.Resolution(None, "engine==1.0 depends on torch==2.11.0; trustrl depends on torch>=2.13")
BRIDGE = pins.Resolution(None, "there is no version of bridge==0.5.2")


def index(*answers):
    """A resolver with prepared answers, and the requirements it was asked about."""
    left, asked = list(answers), []

    def resolver(requirements, python):
        asked.append(list(requirements))
        return left.pop(0)

    return resolver, asked


EXTRAS = ["engine[gpu]==1.0", "trustrl[records,ray] @ file:///trustrl.whl"]
ALONE, CORE = ["engine[gpu]==1.0"], ["engine[gpu]==1.0", "trustrl @ file:///trustrl.whl"]


@pytest.mark.parametrize(
    ("answers", "broken"),
    [((YES,), False), ((NO, YES, YES), True), ((NO, YES, NO), True)],
    ids=["everything-resolves", "its-extras-do-not", "neither-does"],
)
def test_ci_is_red_where_an_engine_resolves_alone_and_not_with_trustrl(answers, broken):
    resolver, asked = index(*answers)
    outcome = pins.resolve_row(ROW, "file:///trustrl.whl", resolver)
    assert outcome.broken is broken
    assert outcome.cause == (NO.cause if broken else "")
    assert asked == [EXTRAS, ALONE, CORE][: len(answers)]


def test_an_engine_that_does_not_resolve_alone_is_listed_with_its_cause_and_leaves_ci_green():
    resolver, asked = index(NO, BRIDGE)
    outcome = pins.resolve_row(ROW, "file:///trustrl.whl", resolver)
    assert not outcome.broken
    assert asked == [EXTRAS, ALONE]
    (line,) = pins.table([outcome]).splitlines()[2:]
    assert line == f"| engine 1.0 | `gpu` | 3.11 | - | no | - | - | `engine` | {BRIDGE.cause} |"


def test_a_conflict_of_several_steps_is_told_by_its_facts_alone():
    said = """error: No solution found when resolving dependencies
  cause: Because sglang==0.5.12 depends on transformers==5.6.0 and verl[sglang]>=0.9.1 depends on sglang==0.5.12, we can conclude that verl[sglang]>=0.9.1 depends on transformers==5.6.0.
         And because verl>=0.9.1 depends on one of:
             transformers>=5.5.3,<5.6.0
             transformers>5.6.0,<5.11
         and you require verl[sglang]==0.9.1, we can conclude that your requirements are unsatisfiable.

  hint: try something else"""
    assert pins.cause_of(said) == (
        "sglang==0.5.12 depends on transformers==5.6.0 and verl[sglang]>=0.9.1 depends on sglang==0.5.12; "
        "verl>=0.9.1 depends on one of: transformers>=5.5.3,<5.6.0 transformers>5.6.0,<5.11"
    )


def test_an_answer_that_is_no_conflict_is_told_as_it_came():
    assert pins.cause_of("error: Failed to fetch: `https://index/simple/x/`\n") == (
        "Failed to fetch: `https://index/simple/x/`"
    )


CONFLICT = (
    "error: No solution found when resolving dependencies\n  cause: Because a depends on b, we can conclude that x."
)


@pytest.mark.parametrize(
    ("answers", "found", "calls"),
    [([(1, CONFLICT)], False, 1), ([(1, "error: timed out"), (0, "torch==2.11.0\n")], True, 2)],
    ids=["a-conflict", "an-index-that-fails-once"],
)
def test_only_failures_that_are_no_conflict_are_tried_again(answers, found, calls, monkeypatch):
    asked = []

    def uv(requirements, python):
        code, said = answers[len(asked)]
        asked.append(requirements)
        return pins.subprocess.CompletedProcess([], code, said, said)

    monkeypatch.setattr(pins, "_uv", uv)
    resolution = pins.resolve_with_uv(["torch"], "3.11")
    assert (resolution.found, len(asked)) == (found, calls)
    assert resolution.versions == ({"torch": "2.11.0"} if found else None)
    assert resolution.cause == ("" if found else "a depends on b")


def test_the_table_is_written_between_the_markers_and_read_back(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{pins.MARKERS[0]}\nstale\n{pins.MARKERS[1]}\n\nafter\n")
    outcomes = [pins.Outcome(ROW, YES, YES, NO), pins.Outcome(ROW, BRIDGE, BRIDGE, BRIDGE)]
    pins.write(page, outcomes[:1], datetime.date(2026, 11, 16))
    text = page.read_text()
    assert text.startswith("before\n\n")
    assert text.endswith("\n\nafter\n")
    assert "stale" not in text
    assert "Resolved on 2026-11-16" in text
    assert pins.verdicts_in(text) == {("engine 1.0", "gpu"): ("yes", "yes", "no")}
    assert pins.verdicts_in(text) == pins.verdicts_in(pins.table(outcomes[:1]))
    pins.write(page, outcomes[1:], datetime.date(2026, 11, 16))
    assert pins.verdicts_in(page.read_text()) == {("engine 1.0", "gpu"): ("no", "-", "-")}


def test_the_page_lists_every_environment_and_none_that_trustrl_breaks():
    listed = pins.verdicts_in(pins.PAGE.read_text())
    assert list(listed) == [(row.engine, row.extra or "-") for row in (*pins.ENGINES, *pins.own_extras())]
    assert {row: said for row, said in listed.items() if said not in {("yes",) * 3, ("no", "-", "-")}} == {}


def test_every_release_that_an_environment_file_installs_is_resolved():
    resolved = {one for row in pins.ENGINES for one in row.requirements}
    plain = {re.sub(r"\[.*?\]", "", one) for one in resolved}
    engines = {re.split("[=[]", one)[0] for one in plain}
    installed = {
        f"{name}=={version}".replace("_", "-")
        for file in (ROOT / "environments").glob("*.txt")
        for name, version, _ in environment_hashes.pins(file.read_text())
        if name.replace("_", "-") in engines
        and not (file.stem == "swift" and name == "trl")  # ms-swift's own requirement, below our extra's
    }
    assert {"ms-swift==4.6.0", "axolotl==0.19.0", "openrlhf==0.11.2", "areal==1.0.4"} < installed
    assert installed <= plain


@pytest.mark.parametrize("page", ["README.md", "docs/reference/compatibility.md"])
def test_pages_name_the_torch_that_the_metadata_demands(page):
    (floor,) = (re.search(r">=([\d.]+)", one)[1] for one in PROJECT["dependencies"] if one.startswith("torch"))
    assert f"{floor} or newer" in (ROOT / page).read_text()

"""Reports on runs of plain TRL and verl, from files that the trainers wrote."""

import gzip
import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from trustrl.runs.open_run import open_runs
from trustrl.tools.report.html_page import page
from trustrl.tools.report.report_contents import gather, summary_of, text

DATA = Path(__file__).parents[2] / "runs" / "data"


def unpacked(name, folder):
    """A run as its trainer left it; the repository holds it compressed."""
    shutil.copytree(DATA / name, folder / name)
    for file in (folder / name).rglob("*.gz"):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    return folder / name


@pytest.mark.parametrize(
    ("name", "engine", "steps", "missing"),
    [
        ("trl-1.16.0", "TRL 1.16.0", 6, {"sampler-trainer mismatch", "token records"}),
        ("verl-0.9.1", "verl", 3, {"groups with identical rewards", "token records"}),
    ],
)
def test_a_stock_run_is_reported_from_what_there_is(name, engine, steps, missing, tmp_path):
    report = gather(open_runs([unpacked(name, tmp_path)]))
    (run,) = summary_of(report)["runs"]
    assert (run["facts"]["engine"], run["steps"], run["region"]) == (engine, steps, None)
    assert {one["what"] for one in run["missing"]} == missing
    assert {"reward", "entropy", "grad_norm", "clipped", "length"} <= set(run["metrics"])
    assert "acted" not in run["metrics"]  # no region, no verdicts
    listed = report.shown[0].listed
    assert listed
    assert all(one.completion.prompt and one.completion.reward is not None for one in listed)
    assert any(one.completion.group is not None for one in listed)
    shown = page(report)
    assert "No trustrl region" in shown
    assert "Which tokens moved" in shown
    assert "missing: token records" in text(report, unicode=True)


def test_a_fall_of_an_evaluation_of_unknown_size_is_not_a_collapse(tmp_path):
    (run,) = summary_of(gather(open_runs([unpacked("trl-1.16.0", tmp_path)])))["runs"]
    assert run["accuracy_after"] < run["accuracy_before"]
    assert run["collapsed"] is False

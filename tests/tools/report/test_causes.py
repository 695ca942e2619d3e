"""The first thing on a report: the causes, their evidence, and what to change."""

import json
import re

import pytest

pytest.importorskip("pyarrow")

from support.run_folders import run_folder, steps, write_groups
from trustrl.runs.open_run import open_runs
from trustrl.runs.run import Completion, Run, RunSettings
from trustrl.tools.explain import explain
from trustrl.tools.report.html_page import page
from trustrl.tools.report.report_contents import gather, summary_of, text
from trustrl.tools.report.shown_completions import choose_completions

BROKE = 24


def too_fast(count=40):
    """A run whose updates move far from a step on, and whose reward falls."""
    return [
        row | ({"trustrl/kl_k3": 0.1 * ((row["step"] - 1) % 4), "reward": 0.02} if row["step"] > BROKE else {})
        | ({"trustrl/kl_k3": 0.0, "reward": 0.6} if row["step"] <= BROKE else {})
        for row in steps(count)
    ]  # fmt: skip


def collapsed(folder, count=96, **more):
    return run_folder(folder, rows=too_fast(count), updates=4, evaluations=(), **more)


def shown(*folders):
    return page(gather(open_runs(folders)))


def test_the_page_opens_with_the_cause_and_the_setting_to_change(tmp_path):
    found = shown(collapsed(tmp_path / "a"))
    body = found[found.index("<body>") :]
    places = [
        body.index(words)
        for words in ("learning rate too large", "optimiser.learning_rate = ", 'id="curves"', 'id="runs"')
    ]
    assert places == sorted(places)
    assert "confidence 0." in body


def test_each_number_has_its_file_its_row_and_a_mark_on_its_curve(tmp_path):
    found = shown(collapsed(tmp_path / "a"))
    assert f"metrics.jsonl, from step {BROKE + 2}" in found
    data = json.loads(re.search(r'id="data">(.*?)</script>', found)[1])
    marked = {chart["title"]: chart["marks"] for chart in data["charts"] if chart.get("marks")}
    assert [mark["step"] for mark in marked["trustrl/kl_k3"]] == [BROKE + 2]
    assert marked["reward"][0]["step"] > BROKE


def test_a_cause_links_to_completions_near_its_step_only_if_there_are_some(tmp_path):
    with_texts, without = collapsed(tmp_path / "a"), collapsed(tmp_path / "b")
    write_groups(with_texts / "records", {"Which?": [0.0, 1.0]}, step=BROKE)
    assert f'href="#text" data-to="0" data-step="{BROKE + 2}" data-by="log_ratio"' in shown(with_texts)
    assert 'href="#text"' not in shown(without)


def test_completions_near_the_step_of_a_cause_are_among_those_shown():
    each_step = [Completion(step=step, text="same", reward=1.0) for step in range(20_000)]
    run = Run(path="a", name="a", source="hand", settings=RunSettings(), rows=[], completions=lambda: iter(each_step))
    listed = [choose_completions(run, None, max_shown=10, near=near).listed for near in ((), (7_777,))]
    assert [7_777 in [shown.completion.step for shown in some] for some in listed] == [False, True]


def test_a_healthy_run_says_so_with_what_was_checked(tmp_path):
    folder = run_folder(tmp_path / "a")
    found = shown(folder)
    assert "Nothing found: no check points to a fault." in found
    assert "Checked: non-finite values, " in found
    assert "Not checked, because the files lack it" in found
    (summary,) = summary_of(gather(open_runs([folder])))["runs"]
    assert summary["findings"] == []
    assert "entropy collapse" in summary["checked"]


def test_a_check_without_enough_batches_is_not_called_done(tmp_path):
    (summary,) = summary_of(gather(open_runs([run_folder(tmp_path / "a", rows=steps(4))])))["runs"]
    assert "non-finite values" in summary["checked"]
    assert "entropy collapse" not in summary["checked"]


def test_a_comparison_opens_with_one_line_for_each_run(tmp_path):
    found = shown(collapsed(tmp_path / "a", name="s-fast"), run_folder(tmp_path / "b", name="s-slow"))
    heads = found[found.index('<ul class="heads">') :].split("</ul>")[0].split("<li>")[1:]
    assert "learning rate too large" in heads[0]
    assert "optimiser.learning_rate" in heads[0]
    assert "Nothing found" in heads[1]


def test_the_terminal_shows_the_paragraphs_of_explain_before_any_setting(tmp_path):
    folder = collapsed(tmp_path / "a")
    said = text(gather(open_runs([folder]), max_points=0, max_shown=0), unicode=True)
    for line in explain(folder).causes_text().splitlines():
        assert line in said
    assert said.index("learning rate too large") < said.index("seed 0")


def test_causes_come_before_symptoms_and_each_group_is_ordered_by_confidence(tmp_path):
    folder = run_folder(
        tmp_path / "a",
        rows=[row | {"frac_reward_zero_std": 1.0, "trustrl/mismatch_abs_mean": 2.0, "reward": 0.0} for row in steps(8)],
        evaluations=(),
    )
    causes = explain(folder).causes
    kinds = [cause.kind for cause in causes]
    assert kinds == sorted(kinds)
    assert {*kinds} == {"cause", "symptom"}
    for kind in kinds:
        scores = [cause.confidence for cause in causes if cause.kind == kind]
        assert scores == sorted(scores, reverse=True)
    assert "Causes come before symptoms" in shown(folder)
    assert "Causes come before symptoms" in explain(folder).text()

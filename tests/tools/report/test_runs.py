"""Run folders as a report reads them: whole, half, broken, or none."""

import json
from pathlib import Path

import pytest

from support.run_folders import run_folder, steps
from trustrl.errors import ConfigError, RecordError
from trustrl.tools.report.run_folders import read_runs, short_labels


def test_a_finished_run_says_what_it_amounts_to(tmp_path):
    (run,) = read_runs([run_folder(tmp_path / "a")])
    assert (run.status, run.steps, run.steps_planned, run.seconds) == ("finished", 8, 8, 12.5)
    verdict = run.verdict
    assert (verdict["accuracy_before"], verdict["accuracy_after"], verdict["collapsed"]) == (0.25, 0.75, False)
    assert run.records == tmp_path / "a" / "records"


def test_a_run_without_a_result_is_unfinished_and_a_cut_off_line_is_left_out(tmp_path):
    folder = run_folder(tmp_path / "a", rows=steps(8)[:3], finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    (run,) = read_runs([folder])
    assert (run.status, run.steps, run.seconds) == ("unfinished", 3, None)


def test_a_run_whose_log_ends_in_an_error_failed_with_these_last_words(tmp_path):
    folder = run_folder(tmp_path / "a", rows=steps(8)[:3], finished=False)
    (tmp_path / "a.log").write_text("step 1\nstep 2\nerror: the sampler died\n")
    (run,) = read_runs([folder])
    assert (run.status, run.last_words) == ("failed", "step 1\nstep 2\nerror: the sampler died")


def test_the_log_of_a_finished_run_is_nobodys_last_words(tmp_path):
    folder = run_folder(tmp_path / "a")
    (tmp_path / "a.log").write_text("error: of an earlier try\n")
    (run,) = read_runs([folder])
    assert (run.status, run.last_words) == ("finished", "")


def test_a_run_that_has_not_begun_has_no_steps(tmp_path):
    (run,) = read_runs([run_folder(tmp_path / "a", rows=[], evaluations=(), finished=False)])
    assert (run.steps, run.rows, run.evaluations, run.verdict["collapsed"]) == (0, [], [], False)


def test_a_region_nobody_registered_here_is_shown_by_its_settings(tmp_path):
    folder = run_folder(tmp_path / "a")
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(text.split("[region]")[0] + '[region]\nkind = "mine"\nwidth = 0.3\n')
    (run,) = read_runs([folder])
    assert run.region is None
    assert dict(run.table("region")) == {"kind": "mine", "width": 0.3}


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        pytest.param(
            lambda folder: (folder / "recipe.toml").unlink(), ConfigError, "no recipe.toml", id="no run's folder"
        ),
        pytest.param(
            lambda folder: (folder / "recipe.toml").write_text("= 3"), RecordError, "must be valid TOML", id="no TOML"
        ),
        pytest.param(
            lambda folder: (folder / "metrics.jsonl").write_text("{]\n"), RecordError, "must be JSON", id="no JSON"
        ),
        pytest.param(lambda folder: (folder / "metrics.jsonl").write_text("{}\n"), RecordError, "step", id="no step"),
        pytest.param(
            lambda folder: (folder / "metrics.jsonl").write_text("[1]\n"), RecordError, "must be JSON", id="no object"
        ),
        pytest.param(
            lambda folder: (folder / "metrics.jsonl").write_text('{"step": 1, "reward": "x"}\n'),
            RecordError,
            "must be JSON",
            id="a reward in words",
        ),
        pytest.param(
            lambda folder: (folder / "evaluation.jsonl").write_text('{"step": 1}\n'),
            RecordError,
            "accuracy",
            id="no accuracy",
        ),
        pytest.param(
            lambda folder: (folder / "result.json").write_text("["), RecordError, "must be JSON", id="a broken result"
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(spoil, error, said, tmp_path):
    folder = run_folder(tmp_path / "a")
    spoil(folder)
    with pytest.raises(error, match=said):
        read_runs([folder])


def test_a_run_is_given_once(tmp_path):
    folder = run_folder(tmp_path / "a")
    with pytest.raises(ConfigError, match="twice"):
        read_runs([folder, tmp_path / "a" / ".." / "a"])


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        pytest.param(["stale-ppo-0"], ["stale-ppo-0"], id="one run keeps its name"),
        pytest.param(["stale-ppo-0", "stale-dppo-topk-tv-0"], ["ppo", "dppo-topk-tv"], id="what they share goes"),
        pytest.param(["ppo-0", "ppo-1"], ["0", "1"], id="seeds"),
        pytest.param(["tour", "tour"], ["tour (a)", "tour (b)"], id="alike"),
        pytest.param(["a-b", "b"], ["a-b", "b"], id="nothing is left without a word"),
    ],
)
def test_labels_are_what_tells_runs_apart(names, labels):
    assert short_labels(names, [Path("a"), Path("b")][: len(names)]) == labels


def test_the_folder_one_stands_in_is_a_run_too(tmp_path, monkeypatch):
    monkeypatch.chdir(run_folder(tmp_path / "a", finished=False))
    (tmp_path / "a.log").write_text("error: no\n")
    (run,) = read_runs([Path(".")])
    assert run.status == "failed"


def test_rows_out_of_order_are_read_in_order(tmp_path):
    folder = run_folder(tmp_path / "a")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(reversed(lines)))
    (run,) = read_runs([folder])
    assert [row["step"] for row in run.rows] == list(range(1, 9))
    assert json.loads(lines[0])["step"] == 1

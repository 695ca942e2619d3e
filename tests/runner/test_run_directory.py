"""Run folders: what is in them, what is refused, and what a kill leaves behind."""

import errno
import json
import math
import os
from types import SimpleNamespace

import pytest

from support.recipes import small
from trustrl.errors import ConfigError, EngineError, RecordError
from trustrl.files import write_whole
from trustrl.runner.commit_points import take_back
from trustrl.runner.directory import RunDirectory
from trustrl.runner.recipe import load
from trustrl.runner.run_recipe import run
from trustrl.runs.run_verdict import collapsed, lowest_accuracy, rollouts, steps_to, summary


class FakeEngine:
    """Not an engine: it writes what one would write, and can be interrupted. Checkpoints every second step."""

    def __init__(self, dies_after=None):
        self.dies_after = dies_after
        self.began_at = []

    def __call__(self, recipe, directory, progress):
        saved = sorted(int(one.name) for one in directory.checkpoints.glob("*"))
        done = saved[-1] if saved else 0
        self.began_at.append(done)
        take_back(directory, directory.checkpoints / str(done) if done else None, done, None, progress.log)
        if not directory.rows("evaluation"):
            directory.append("evaluation", {"step": 0, "accuracy": 0.25})
        for step in range(done + 1, recipe.schedule.steps + 1):
            row = {"step": step, "reward": step / 10, "loss": 0.5, "trustrl/masked_share": 0.1}
            directory.append("metrics", row)
            progress.step(row)
            if step == self.dies_after:
                raise KeyboardInterrupt
            if step % 2 == 0:
                (directory.checkpoints / str(step)).mkdir(parents=True)
        directory.append("evaluation", {"step": step, "accuracy": 0.75})


def test_a_run_with_a_fake_engine_leaves_everything_behind(tmp_path):
    result = run(small(), tmp_path / "run", engine=FakeEngine())
    assert load(tmp_path / "run" / "recipe.toml") == small()
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert {"python", "platform", "packages", "commit", "cpus"} <= environment.keys()
    assert [row["step"] for row in RunDirectory(tmp_path / "run").rows()] == list(range(1, 9))
    assert (result["accuracy_before"], result["accuracy_after"]) == (0.25, 0.75)
    assert result["rollouts"] == 4, "two updates on each"
    assert result["reward_last"] == result["reward_best"] == pytest.approx(0.5), "mean of .3, .5 and .7"
    assert result["masked_share"] == pytest.approx(0.1)
    assert not result["collapsed"]


def test_a_clock_that_is_set_back_leaves_the_seconds_of_a_run_positive(tmp_path, monkeypatch):
    def clock_set_back(*given):
        monkeypatch.setattr("time.time", lambda: 0.0)
        FakeEngine()(*given)

    assert run(small(), tmp_path, engine=clock_set_back)["seconds"] >= 0


@pytest.mark.parametrize(
    ("error", "free"),
    [
        pytest.param(OSError(errno.ENOSPC, "No space left on device"), 2**30, id="an OSError"),
        pytest.param(
            ValueError("I/O error: No space left on device (os error 28)"), 2**30, id="as safetensors says it"
        ),
        pytest.param(RuntimeError("unexpected pos 273472 vs 273360"), 100, id="as torch says it"),
    ],
)
def test_a_full_disk_is_named_with_the_way_to_continue(tmp_path, monkeypatch, error, free):
    def fails(*_):
        raise error

    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(EngineError, match=r"The disk must have room.*Free some space.*--resume"):
        run(small(), tmp_path, engine=fails)
    run(small(), tmp_path, resume=True, engine=FakeEngine())


def test_scratch_files_of_a_killed_process_are_removed_on_resume_and_other_files_are_not(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(small(), tmp_path, engine=FakeEngine(3))
    for name in (".metrics.jsonl.4711", ".recipe.toml.4711", ".metrics.jsonl.mine"):
        (tmp_path / name).write_text("half a li")
    run(small(), tmp_path, resume=True, engine=FakeEngine())
    assert sorted(one.name for one in tmp_path.glob(".*")) == [".lock", ".metrics.jsonl.mine"]


def test_other_errors_of_an_engine_stay_as_they_are(tmp_path):
    def fails(*_):
        raise RuntimeError("unexpected pos 273472 vs 273360")

    with pytest.raises(RuntimeError, match="unexpected pos"):
        run(small(), tmp_path, engine=fails)


@pytest.mark.parametrize("dies_after", range(1, 9))
def test_a_fake_engine_that_dies_anywhere_and_is_resumed_writes_every_step_once(tmp_path, dies_after):
    with pytest.raises(KeyboardInterrupt):
        run(small(), tmp_path, engine=FakeEngine(dies_after))
    assert not RunDirectory(tmp_path).finished
    engine = FakeEngine()
    run(small(), tmp_path, resume=True, engine=engine)
    assert engine.began_at == [(dies_after - 1) // 2 * 2]
    assert [row["step"] for row in RunDirectory(tmp_path).rows()] == list(range(1, 9))
    assert [row["step"] for row in RunDirectory(tmp_path).rows("evaluation")] == [0, 8]


def test_half_a_line_at_the_end_of_the_metrics_is_left_out(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.append("metrics", {"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    assert directory.rows() == [{"step": 1}]
    take_back(directory, tmp_path / "checkpoint of release 0.1.0", 1, None, print)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_finished_run_is_not_overwritten_and_resuming_it_gives_its_result(tmp_path):
    result = run(small(), tmp_path, engine=FakeEngine())
    with pytest.raises(ConfigError, match="contains a finished run"):
        run(small(), tmp_path, engine=FakeEngine())
    untouched = FakeEngine()
    assert run(small(), tmp_path, resume=True, engine=untouched) == result
    assert untouched.began_at == []


def test_a_half_run_is_not_overwritten(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(small(), tmp_path, engine=FakeEngine(3))
    with pytest.raises(ConfigError, match="Add --resume"):
        run(small(), tmp_path, engine=FakeEngine())


def test_a_run_is_not_resumed_with_another_recipe(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(small(), tmp_path, engine=FakeEngine(3))
    with pytest.raises(ConfigError, match=r"region\.kind.*optimiser\.learning_rate|optimiser\.learning_rate.*region"):
        run(small("region.preset=ppo", "optimiser.learning_rate=0.5"), tmp_path, resume=True, engine=FakeEngine())


def test_what_cannot_work_is_refused_before_a_folder_is_made(tmp_path):
    with pytest.raises(ConfigError):
        run(small("sampler.kind=vllm", "region.preset=dppo-full-tv"), tmp_path / "run", engine=FakeEngine())
    assert not (tmp_path / "run").exists()


def test_two_processes_do_not_share_a_folder(tmp_path):
    directory = RunDirectory(tmp_path)
    with directory.held(), pytest.raises(ConfigError, match="another process runs"):
        run(small(), tmp_path, engine=FakeEngine())
    run(small(), tmp_path, engine=FakeEngine())


def test_a_lock_that_is_a_link_is_refused_and_its_target_keeps_its_content(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=r"\.lock must be a regular file"):
        run(small(), tmp_path / "run", engine=FakeEngine())
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_link_to_nowhere_as_lock_makes_no_file(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "planted")
    with pytest.raises(ConfigError, match=r"\.lock must be a regular file"):
        run(small(), tmp_path / "run", engine=FakeEngine())
    assert not (tmp_path / "planted").exists()


def test_a_lock_is_not_truncated(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    os.link(tmp_path / "precious", tmp_path / "run" / ".lock")
    run(small(), tmp_path / "run", engine=FakeEngine())
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["FIFO", "directory"])
def test_a_lock_of_another_kind_is_refused_without_waiting(tmp_path, make):
    make(tmp_path / ".lock")
    with pytest.raises(ConfigError, match=r"\.lock must be a regular file"):
        run(small(), tmp_path, engine=FakeEngine())


def test_ranks_other_than_the_first_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run(small(), tmp_path / "run", engine=lambda *_: None) == {}
    assert not (tmp_path / "run").exists()


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    RunDirectory(tmp_path).append("metrics", {"step": 1, "loss": float("nan"), "x": float("inf")})
    assert RunDirectory(tmp_path).rows() == [{"step": 1, "loss": None, "x": None}]
    RunDirectory(tmp_path).finish({"curve": [0.5, float("inf")]})
    assert RunDirectory(tmp_path).result() == {"curve": [0.5, None]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param(b'{"step": 2, "reward": \xff}', "can't decode byte 0xff", id="a byte that is no UTF-8"),
        pytest.param(b'{"step": 2, "rew', "at column 13", id="half an object"),
        pytest.param(b"", "at column 1", id="an empty line"),
        pytest.param(b"[" * 100_000, "nested more than 64 levels deep", id="a hundred thousand brackets"),
        pytest.param(b"[2]", "not an object", id="a list"),
        pytest.param(b'{"reward": 0.5}', "without step", id="no step"),
        pytest.param(b'{"step": "2"}', "got '2' as 'step'", id="a step in words"),
        pytest.param(b'{"step": null}', "got None as step", id="no number as step"),
        pytest.param(b'{"step": 2, "reward": "x"}', "got 'x' as 'reward'", id="a reward in words"),
        pytest.param(b'{"step": 2, "reward": {}}', "got {} as 'reward'", id="an object as reward"),
        pytest.param(b'{"step": 2, "reward": true}', "got True as 'reward'", id="a truth as reward"),
    ],
)
def test_a_line_that_is_no_row_is_refused_with_its_file_and_number(tmp_path, line, said):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": null}\n' + line + b"\n")
    with pytest.raises(RecordError, match=r"metrics\.jsonl, line 2, must be JSON") as caught:
        RunDirectory(tmp_path).rows()
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_an_evaluation_has_an_accuracy_that_is_a_number(tmp_path):
    for line in ('{"step": 0}\n', '{"step": 0, "accuracy": "x"}\n'):
        (tmp_path / "evaluation.jsonl").write_text(line)
        with pytest.raises(RecordError, match=r"evaluation\.jsonl, line 1, must be JSON.*accuracy"):
            RunDirectory(tmp_path).rows("evaluation")


@pytest.mark.parametrize("text", ["[]", "{", '{"seconds": "x"}'])
def test_a_result_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(RecordError, match=r"result\.json must be JSON"):
        RunDirectory(tmp_path).result()


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "page.html").mkdir()
    with pytest.raises(OSError, match=r"page\.html"):
        write_whole(tmp_path / "page.html", "text")
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


def rows(rewards, losses=None):
    losses = losses or [0.0] * len(rewards)
    return [{"step": i + 1, "reward": r, "loss": x} for i, (r, x) in enumerate(zip(rewards, losses, strict=True))]


@pytest.mark.parametrize(
    ("rewards", "losses", "verdict"),
    [
        pytest.param([0.1] * 10 + [0.9] * 10, None, False, id="it learned"),
        pytest.param([0.9] * 10 + [0.1] * 10, None, True, id="it fell"),
        pytest.param([0.9] * 10 + [0.5] * 10, None, False, id="it fell by less than half"),
        pytest.param([0.2] * 19 + [0.0], None, False, id="one bad step in a tenth of two"),
        pytest.param([0.5] * 10, [0.0] * 9 + [None], True, id="a loss that is not finite"),
        pytest.param([0.4, 0.0, 0.0], None, True, id="three rollouts below half of the first"),
        pytest.param([0.4, 0.0], None, False, id="fewer than three rollouts"),
    ],
)
def test_without_a_second_evaluation_the_reward_of_three_rollouts_decides_a_collapse(rewards, losses, verdict):
    assert collapsed(rows(rewards, losses), [], 1) is verdict
    assert collapsed(rows(rewards, losses), [{"step": 0, "accuracy": 0.9, "count": 500}], 1) is verdict


def evaluations(before, after, count=500):
    return [{"step": 0, "accuracy": before, "count": count}, {"step": 128, "accuracy": after, "count": count}]


def rows_of_rollouts(rewards, updates=16):
    """As TRL leaves them: the reward of a rollout in the row of each update on it."""
    return rows([reward for reward in rewards for _ in range(updates)])


def test_one_bad_rollout_at_the_end_of_eight_is_no_collapse():
    bad_end = rows_of_rollouts([0.44, 0.31, 0.48, 0.28, 0.55, 0.61, 0.77, 0.36])  # dppo-binary-tv, seed 3 of `both`
    assert not collapsed(bad_end, evaluations(0.35, 0.698), 16)
    assert not collapsed(bad_end, [], 16), "before the last evaluation"
    assert summary(bad_end, [], 16)["rollouts"] == 8


@pytest.mark.parametrize(
    ("before", "after", "count", "verdict"),
    [
        pytest.param(0.35, 0.698, 500, False, id="it learned"),
        pytest.param(0.332, 0.106, 500, True, id="it lost what it had"),
        pytest.param(0.362, 0.332, 500, False, id="within two standard errors"),
        pytest.param(0.0625, 0.0, 16, False, id="one problem of sixteen"),
        pytest.param(0.03, 0.0, 500, True, id="a low start"),
        pytest.param(0.0, 0.0, 500, False, id="nothing to lose"),
    ],
)
def test_held_out_accuracy_decides_a_collapse_whatever_the_reward(before, after, count, verdict):
    for rewards in ([0.1] * 4 + [0.9] * 4, [0.9] * 4 + [0.1] * 4):
        assert collapsed(rows_of_rollouts(rewards), evaluations(before, after, count), 16) is verdict


def test_the_margin_is_two_standard_errors_of_the_difference():
    margin = 2 * math.sqrt((0.4 * 0.6 + 0.2 * 0.8) / 100)
    assert lowest_accuracy(evaluations(0.4, 0.2, 100)) == pytest.approx(0.4 - margin)
    assert lowest_accuracy(evaluations(0.4, 0.2, 100)[:1]) is None


def test_a_row_per_batch_and_a_row_per_update_have_the_same_rollouts():
    per_update = rows_of_rollouts([0.1, 0.2, 0.3, 0.4], updates=2)
    per_batch = [{"step": step, "reward": step / 20, "loss": 0.0} for step in (2, 4, 6, 8)]
    assert [row["reward"] for row in rollouts(per_update, 2)] == [0.1, 0.2, 0.3, 0.4]
    assert [row["reward"] for row in rollouts(per_batch, 2)] == [0.1, 0.2, 0.3, 0.4]


def test_steps_to_a_threshold_needs_a_tenth_of_the_run_above_it():
    assert steps_to(rows([0.0, 1.0, 0.0, 0.0] + [1.0] * 16), 0.75) == 6
    assert steps_to(rows([0.1] * 20), 0.75) is None


def test_a_summary_of_nothing_is_empty():
    assert summary([], [], 1)["accuracy_after"] is None

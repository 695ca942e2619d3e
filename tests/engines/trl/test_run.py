"""`trustrl run` with the real TRL: whole runs, killed and resumed runs."""

import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("pyarrow")

from failures.faults import at_call, calls_in, compiled

from support.trl_commands import command, environment, run
from trustrl import config_from_dict, preset
from trustrl.recording import read
from trustrl.recording.part_names import PartName
from trustrl.recording.record_files import parts_in
from trustrl.runner import trl_run
from trustrl.runner.directory import RunDirectory
from trustrl.world import models, tasks
from trustrl.world.models import accuracy

COMPLETE = "trustrl_complete"
STEPS = 12
SMALL = [
    f"schedule.steps={STEPS}", "schedule.checkpoint_every=4", "evaluation.count=16", "evaluation.every=3",
    "optimiser.learning_rate=3e-3",
]  # fmt: skip
OWN_CLOCK = {"seconds"}


def measured(folder):
    """Metrics and evaluations without what depends on the clock."""
    directory = RunDirectory(folder)
    rows = [{key: value for key, value in row.items() if key not in OWN_CLOCK} for row in directory.rows()]
    return rows, directory.rows("evaluation")


def files_of_records(folder):
    """The part files that count, by table, step and rank. Names also say which process wrote them."""
    tables = ("", "sequences", "texts")
    parts = ((table, PartName.of(file.name)) for table in tables for file in parts_in(folder / "records", table))
    return [(table, (part.first, part.rank)) for table, part in parts]


def assert_same(folder, uninterrupted):
    """Metrics, evaluations and every recorded token."""
    assert measured(folder) == measured(uninterrupted)
    assert files_of_records(folder) == files_of_records(uninterrupted)
    assert read(folder / "records").table.equals(read(uninterrupted / "records").table)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, id=name, marks=[pytest.mark.xdist_group(f"runs, {name}"), *more])
        for name, more in (("dppo-binary-tv", ()), ("troll", (pytest.mark.long,)))
    ],
)
def whole(request, tmp_path_factory):
    """(settings, folder) of a run that nobody interrupted."""
    settings = [f"region.preset={request.param}", *SMALL]
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = run("run", *settings, "--out", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == RunDirectory(folder).result()
    return settings, folder


def test_a_run_writes_every_step_and_evaluates_before_between_and_after(whole):
    _, folder = whole
    rows, evaluations = measured(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["step"] for row in evaluations] == [0, 3, 6, 9, STEPS]
    for row in rows:
        assert {"reward", "loss", "grad_norm", "learning_rate", "trustrl/ratio_mean"} <= row.keys()
        assert row["trustrl/tokens"] > 0
    assert len({row["reward"] for row in rows}) > 1
    assert rows[0]["grad_norm"] > 0
    assert rows[0]["trustrl/ratio_max"] == pytest.approx(1.0, abs=1e-4), "the first update of a batch"
    assert abs(rows[1]["trustrl/ratio_max"] - 1) > 1e-3, "the second is off-policy"


def test_the_records_hold_every_token_of_every_step(whole):
    """The recipe asks for all sequences; TRL counts the updates that are done, so its step 0 is our 1."""
    settings, folder = whole
    records = read(folder / "records")
    rows, _ = measured(folder)
    assert records["step"].unique().tolist() == list(range(STEPS))
    for row in rows:
        now = records["step"] == row["step"] - 1
        assert now.sum() == row["trustrl/tokens"]
        assert records["entropy"][now].mean().item() == pytest.approx(row["entropy"], rel=1e-5)
    assert config_from_dict(records.region) == preset(settings[0].removeprefix("region.preset="))


def killed_when(settings, folder, reached):
    """A run that is killed, with no chance to tidy up, soon after `reached()`; True unless it was done by then."""
    process = subprocess.Popen(
        command("run", *settings, "--out", folder, "--resume"), env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while process.poll() is None and not reached():
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def killed_after(settings, folder, rows, seconds):
    """A run that is killed so many seconds after it has written so many rows of metrics and evaluations."""
    directory, file = RunDirectory(folder), folder / "environment.json"
    before = file.read_text() if file.exists() else None

    def reached():
        if not file.exists() or (attempt := file.read_text()) == before or "resumed_after" not in json.loads(attempt):
            return False  # a run that is resumed first takes back the rows behind its checkpoint
        if len(directory.rows()) + len(directory.rows("evaluation")) < rows:
            return False
        time.sleep(seconds)
        return True

    return killed_when(settings, folder, reached)


def test_a_run_killed_at_five_random_moments_and_resumed_ends_as_if_nothing_had_happened(whole, tmp_path):
    """From its start to two thirds of its steps; later it might be done before it can be killed."""
    settings, uninterrupted = whole
    draw = random.Random(uninterrupted.parent.name)
    moments = sorted((draw.randint(0, STEPS - 1), draw.uniform(0.0, 0.1)) for _ in range(5))
    kills = [killed_after(settings, tmp_path / "run", *moment) for moment in moments]
    assert all(kills), f"a run was done before it was killed: {moments}"
    done = run("run", *settings, "--out", tmp_path / "run", "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(tmp_path / "run", uninterrupted)


def test_a_run_killed_after_its_second_checkpoint_goes_on_from_there(whole, tmp_path):
    """Not at a random moment: the checkpoint must have been used."""
    settings, uninterrupted = whole
    folder = tmp_path / "run"
    marker = folder / "checkpoints" / "checkpoint-8" / COMPLETE
    if not killed_when(settings, folder, marker.exists):
        pytest.skip("it was done before it could be killed")
    (folder / "checkpoints" / "checkpoint-12").mkdir(exist_ok=True)  # as a kill while it is written would leave it
    (folder / "checkpoints" / "checkpoint-12" / COMPLETE).unlink(missing_ok=True)
    done = run("run", *settings, "--out", folder, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming after step 8" in done.stderr
    assert_same(folder, uninterrupted)


@pytest.mark.skipif(shutil.which("cc") is None, reason="the library that kills needs a C compiler")
def test_a_run_killed_inside_a_checkpoint_write_and_inside_a_record_write_ends_as_if_nothing_had_happened(
    whole, tmp_path
):
    """With half of the bytes of the write on the disk. `studies/10-runs-survive` does it at many more places."""
    settings, uninterrupted = whole
    folder, log, library = tmp_path / "run", tmp_path / "calls.log", str(compiled(tmp_path))
    optimizer = str(folder / "checkpoints/checkpoint-8/optimizer.pt")
    for fault in (at_call(optimizer, 5, "tear", log), at_call(str(folder / "records/.step-00000009"), 9, "tear", log)):
        done = run("run", *settings, "--out", folder, "--resume", LD_PRELOAD=library, **fault)
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert [line.split()[1] for line in calls_in(log)] == ["writev"] * 5 + ["write"] * 9
    done = run("run", *settings, "--out", folder, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming after step 8" in done.stderr
    assert_same(folder, uninterrupted)
    assert (folder / "checkpoints/set-aside-checkpoint-8").is_dir()


def test_a_run_killed_between_its_last_checkpoint_and_its_result_is_only_evaluated(whole, tmp_path):
    settings, uninterrupted = whole
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", str(uninterrupted), str(folder)], check=True)
    (folder / "result.json").unlink()
    before, evaluations = measured(uninterrupted)
    (folder / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations[:-1]))
    done = run("run", *settings, "--out", folder, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert measured(folder) == (before, evaluations)


def test_a_finished_run_is_refused_with_2(whole):
    settings, folder = whole
    done = run("run", *settings, "--out", folder)
    assert done.returncode == 2
    assert "contains a finished run" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        pytest.param("engine.settings.no_such_field=1", "fields of TRL's GRPOConfig", id="a field TRL does not have"),
        pytest.param("engine.settings.top_p=0.9", "top_p must be 1.0", id="a setting no region goes with"),
        pytest.param("engine.ranks_per_node=2", "torchrun --nproc_per_node 2", id="one process for two ranks"),
    ],
)
def test_settings_that_trl_or_the_region_refuse_end_with_2(tmp_path, setting, said):
    done = run("run", *SMALL, setting, "--out", tmp_path / "run")
    assert done.returncode == 2, done.stderr[-3000:]
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_two_ranks_train_one_run_that_the_first_of_them_writes(tmp_path):
    """Started as the plan says; each rank records the tokens it trained on."""
    folder = tmp_path / "run"
    settings = ["engine.ranks_per_node=2", "schedule.steps=2", "evaluation.count=33", "evaluation.temperature=0"]
    done = run("run", *settings, "--out", folder, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == RunDirectory(folder).result()
    rows, evaluations = measured(folder)
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["step"] for row in evaluations] == [0, 2]
    assert evaluations[0]["accuracy"] == pytest.approx(_accuracy_of_one_process(33)), "of 17 and 16 answers"
    records = read(folder / "records")
    assert records["rank"].unique().tolist() == [0, 1]
    for row in rows:
        assert (records["step"] == row["step"] - 1).sum() == row["trustrl/tokens"]


def _accuracy_of_one_process(count):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.path("tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return accuracy.greedy_accuracy(model, tokenizer, tasks.load("arithmetic"), count)


def test_a_rank_answers_its_share_of_an_evaluation(monkeypatch):
    problems, asked = list(range(8)), []

    def scores(model, tokenizer, task, rows, chosen):
        asked.append((rows, chosen.seed))
        return [float(row) for row in rows]

    def gather(parts, own):
        parts[:] = [[float(row) for row in problems[rank::3]] for rank in range(3)]
        assert parts[1] == own

    monkeypatch.setattr(accuracy, "answer_scores", scores)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    chosen = accuracy.Decoding(5, 8, 1.0)
    assert trl_run._scores_of_all_ranks(None, None, None, problems, chosen) == problems
    assert asked == [([1, 4, 7], 6)]

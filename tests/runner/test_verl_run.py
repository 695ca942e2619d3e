"""verl's log as our metrics file, with a process that only writes what verl would log."""

import sys

import pytest

from runner.test_recipe import small
from trustrl import EngineError
from trustrl.runner import verl_run
from trustrl.runner.directory import RunDirectory
from trustrl.runner.running import run

FAKE_VERL = """
import json, os, pathlib, sys, time
dies_after, batches = int(sys.argv[1]), 4
saved = pathlib.Path("checkpoints/latest_checkpointed_iteration.txt")
done = int(saved.read_text()) if saved.exists() else 0
log = open(os.environ["VERL_FILE_LOGGER_PATH"], "w")
def write(step, data):
    text = json.dumps({"step": step, "data": data}) + chr(10)
    log.write(text[:9]); log.flush(); time.sleep(.05); log.write(text[9:]); log.flush()
write(done, {"val-core/trustrl/arithmetic/reward/mean@1": .25, "val-aux/num_turns/min": 2})
for batch in range(done + 1, batches + 1):
    if batch == dies_after + 1:
        sys.exit("out of luck")
    data = {"critic/score/mean": batch / 10, "actor/grad_norm": 1.0, "actor/pg_loss": float("nan"),
            "actor/trustrl/masked_share": .1, "perf/throughput": 9}
    if batch == batches:
        data["val-core/trustrl/arithmetic/reward/mean@1"] = .75
    write(batch, data)
    if batch % 2 == 0:
        saved.parent.mkdir(exist_ok=True); saved.write_text(str(batch))
"""


@pytest.fixture
def fake_verl(monkeypatch):
    """Sets after how many batches the process that stands in for verl ends with an error."""

    def install(dies_after=99):
        monkeypatch.setattr(verl_run, "require_packages", lambda recipe: None)
        monkeypatch.setattr(verl_run, "_write_data", lambda recipe, folder: None)
        monkeypatch.setattr(verl_run.models, "path", lambda name: name)
        monkeypatch.setattr(
            verl_run, "command", lambda recipe, folder, model: [sys.executable, "-c", FAKE_VERL, str(dies_after)]
        )

    return install


RECIPE = small("engine.name=verl", "schedule.updates_per_batch=2")


def test_a_log_of_a_fake_verl_becomes_our_metrics(fake_verl, tmp_path):
    fake_verl()
    result = run(RECIPE, tmp_path)
    rows = RunDirectory(tmp_path).rows()
    assert [row["step"] for row in rows] == [2, 4, 6, 8], "updates, where verl counts batches"
    assert [row["reward"] for row in rows] == [0.1, 0.2, 0.3, 0.4]
    assert {"step", "reward", "loss", "grad_norm", "trustrl/masked_share", "seconds"} == rows[0].keys()
    assert rows[0]["loss"] is None
    assert [(row["step"], row["accuracy"]) for row in RunDirectory(tmp_path).rows("evaluation")] == [
        (0, 0.25),
        (8, 0.75),
    ]
    assert (result["accuracy_before"], result["accuracy_after"], result["collapsed"]) == (0.25, 0.75, True)


@pytest.mark.parametrize("dies_after", [0, 1, 2, 3])
def test_a_fake_verl_that_fails_is_reported_with_its_last_words_and_goes_on_where_it_saved(
    fake_verl, tmp_path, dies_after
):
    fake_verl(dies_after)
    with pytest.raises(EngineError, match="out of luck"):
        run(RECIPE, tmp_path)
    assert not RunDirectory(tmp_path).finished
    fake_verl()
    run(RECIPE, tmp_path, resume=True)
    assert [row["step"] for row in RunDirectory(tmp_path).rows()] == [2, 4, 6, 8]
    steps = [row["step"] for row in RunDirectory(tmp_path).rows("evaluation")]
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert steps[-1] == 8

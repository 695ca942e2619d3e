"""verl's log as our metrics file, with a process that only writes what verl would log."""

import importlib
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.recipes import small
from support.record_names import part_name
from trustrl.errors import ConfigError, EngineError, MissingPackageError
from trustrl.runner import trackers, verl_run
from trustrl.runner.directory import RunDirectory
from trustrl.runner.manifests import MANIFEST, Seal, is_marked, write_manifest
from trustrl.runner.run_recipe import run
from trustrl.runner.signing import Key

FAKE_VERL = """
import json, os, pathlib, sys, time, zipfile
(dies_after, every), batches = map(int, sys.argv[1].split("/")), 4
saved = pathlib.Path("checkpoints/latest_checkpointed_iteration.txt")
given = dict(one.split("=", 1) for one in sys.argv[2:])
loaded = given.get("trainer.resume_from_path", "global_step_0")
assert given["trainer.resume_mode"] == ("resume_path" if "trainer.resume_from_path" in given else "disable")
done = int(loaded.rpartition("global_step_")[2])
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
    if batch % every == 0:
        folder = saved.parent / f"global_step_{batch}"
        (folder / "actor").mkdir(parents=True)
        for name in ("actor/optim.pt", "data.pt"):
            with zipfile.ZipFile(folder / name, "w") as file:
                file.writestr("data", bytes(100))
        saved.write_text(str(batch))
"""


SAVES_FIRST = (
    FAKE_VERL.replace("    write(batch, data)\n", "") + "    if batch != dies_after:\n        write(batch, data)\n"
)
"""As verl does: the log of a batch comes after its checkpoint. It ends before it has logged batch `dies_after`."""


@pytest.fixture
def fake_verl(monkeypatch):
    """Sets after how many batches the process that stands in for verl ends with an error."""

    def install(dies_after=99, every=2, program=FAKE_VERL, sets=None):
        monkeypatch.setattr(verl_run, "require_packages", lambda recipe: None)
        monkeypatch.setattr(verl_run, "_write_data", lambda recipe, folder: sets or {"trustrl/arithmetic": 500})
        monkeypatch.setattr(verl_run.models, "path", lambda name: name)
        monkeypatch.setattr(verl_run, "command", lambda *_: [sys.executable, "-c", program, f"{dies_after}/{every}"])

    return install


TWO_SETS = FAKE_VERL.replace(
    '"val-aux/num_turns/min": 2', '"val-core/trustrl/a/b/reward/mean@4": .5, "val-core/trustrl/math/acc/mean@1": 1.0'
)


def test_sets_of_a_fake_verl_are_evaluated_each_by_itself(fake_verl, tmp_path):
    fake_verl(program=TWO_SETS, sets={"trustrl/arithmetic": 100, "trustrl/a/b": 200, "trustrl/math": 100})
    run(RECIPE, tmp_path / "run")
    first = RunDirectory(tmp_path / "run").rows("evaluation")[0]
    sets = {"accuracy/arithmetic": 0.25, "accuracy/a/b": 0.5, "accuracy/math": 1.0}
    assert first == {"step": 0, "accuracy": 0.5625, "count": 400, **sets}


RECIPE = small("engine.name=verl", "schedule.updates_per_batch=2")


@pytest.mark.parametrize(
    ("missing", "device", "says"),
    [
        ("verl", "cuda", r'^verl is not installed. Run `pip install "trustrl\[verl\]"`.$'),
        ("verl", "cpu", r'^verl is not installed. Run `pip install "trustrl\[verl,verl-cpu\]"`.$'),
        (
            "trustrl_verl_cpu",
            "cpu",
            r'^trustrl_verl_cpu is not installed. Run `pip install "trustrl\[verl,verl-cpu\]"`.$',
        ),
    ],
)
def test_a_missing_package_is_named_with_its_command_before_anything_starts(
    missing, device, says, tmp_path, monkeypatch
):
    monkeypatch.setattr("trustrl.optional_imports.find_spec", lambda name: None if name == missing else name)
    recipe = small("engine.name=verl", f'engine.device="{device}"', "sampler.kind=vllm")
    with pytest.raises(MissingPackageError, match=says):
        run(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_gpu_does_not_need_the_package_for_cpus(monkeypatch):
    monkeypatch.setattr("trustrl.optional_imports.find_spec", lambda name: None if name == "trustrl_verl_cpu" else name)
    verl_run.require_packages(small("engine.name=verl", 'engine.device="cuda"', "sampler.kind=vllm"))


def test_the_old_name_of_the_package_for_cpus_raises_with_the_new_one(monkeypatch):
    # pytest keeps a module whose import failed when it looked for doctests.
    monkeypatch.delitem(sys.modules, "trustrl.engines.verl_cpu", raising=False)
    with pytest.raises(MissingPackageError, match=r"verl_cpu must be imported as trustrl_verl_cpu.*EXTERNAL_MODULES"):
        importlib.import_module("trustrl.engines.verl_cpu.plugin")


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


LOGS_NOTHING = "print('trained')"


def test_a_fake_verl_whose_log_is_empty_is_an_error(fake_verl, tmp_path):
    """As on a Ray cluster with a separate environment, or without a shared folder."""
    fake_verl(program=LOGS_NOTHING)
    with pytest.raises(EngineError, match=r"verl must log 8 steps, got 0, though it ended without an error"):
        run(RECIPE, tmp_path / "run")
    assert not (tmp_path / "run/result.json").exists()


PRINTS_ITS_SETTINGS = FAKE_VERL + "\nprint(*sys.argv, sep='\\n')"


def test_a_cluster_gets_the_variables_of_the_log_and_the_tracker_from_a_fake_verl(fake_verl, tmp_path, monkeypatch):
    """verl logs in a process of Ray, which may have been started elsewhere. Without them wandb would send the run."""
    monkeypatch.setenv("WANDB_PROJECT", "mine: {a}")
    monkeypatch.setattr(trackers, "require_package", lambda recipe: None)
    fake_verl(program=PRINTS_ITS_SETTINGS)
    run(small("engine.name=verl", "schedule.updates_per_batch=2", "logging.tracker=wandb"), tmp_path / "run")
    passed = re.findall(
        r"^\+ray_kwargs.ray_init.runtime_env.env_vars.(\w+)=(.*)$", (tmp_path / "run/verl.log").read_text(), re.M
    )
    variables = {name: json.loads(value) for name, value in passed}
    assert variables["WANDB_MODE"] == "offline"
    assert variables["WANDB_PROJECT"] == "mine: {a}"
    assert Path(variables["VERL_FILE_LOGGER_PATH"]).parent == tmp_path / "run"


def test_a_fake_verl_that_is_quiet_for_long_is_named_and_one_that_is_not_is_not(
    fake_verl, tmp_path, monkeypatch, capsys
):
    fake_verl()
    run(RECIPE, tmp_path / "usual")
    assert "warning" not in capsys.readouterr().err
    monkeypatch.setattr(verl_run, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(verl_run, "POLLING_SECONDS", 0.02)
    run(RECIPE, tmp_path / "quiet")
    said = capsys.readouterr().err
    assert "warning: verl has finished no step for" in said
    assert f"see {tmp_path / 'quiet' / 'verl.log'}" in said
    assert "--resume" in said


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


@pytest.fixture
def died(fake_verl, tmp_path):
    """The directory of a run that a fake verl left after three batches, each with a checkpoint."""
    fake_verl(3, every=1)
    with pytest.raises(EngineError, match="out of luck"):
        run(RECIPE, tmp_path / "run")
    fake_verl(every=1)
    return tmp_path / "run"


def resume(folder, **more):
    run(RECIPE, folder, resume=True, **more)
    assert [row["step"] for row in RunDirectory(folder).rows()] == [2, 4, 6, 8]


def names_in(folder):
    return sorted(one.name for one in (folder / "checkpoints").iterdir() if one.is_dir())


def test_every_checkpoint_of_a_fake_verl_gets_a_manifest_and_the_newest_is_resumed_from(died, capsys):
    assert is_marked(died / "checkpoints" / "global_step_3")
    resume(died)
    assert "resuming after step 6" in capsys.readouterr().err
    assert names_in(died) == [f"global_step_{batch}" for batch in (1, 2, 3, 4)]


DAMAGE = pytest.mark.parametrize("damage", [os.unlink, lambda file: os.truncate(file, 50)], ids=["missing", "cut off"])


@DAMAGE
def test_a_fake_verl_s_damaged_newest_checkpoint_is_set_aside_and_the_one_before_is_loaded(died, capsys, damage):
    damage(died / "checkpoints" / "global_step_3" / "data.pt")
    resume(died)
    said = capsys.readouterr().err
    assert "global_step_3 is not used: data.pt" in said
    assert "resuming after step 4" in said
    assert names_in(died) == [*(f"global_step_{batch}" for batch in (1, 2, 3, 4)), "set-aside-global_step_3"]


def test_a_fake_verl_s_newest_checkpoint_is_set_aside_if_the_run_was_killed_before_its_manifest(died, capsys):
    (died / "checkpoints" / "global_step_3" / MANIFEST).unlink()
    resume(died)
    said = capsys.readouterr().err
    assert "global_step_3 is not used: it was not complete when the run stopped" in said
    assert "resuming after step 4" in said
    assert "set-aside-global_step_3" in names_in(died)


def test_a_checkpoint_of_a_fake_verl_whose_metrics_were_never_logged_is_not_complete(fake_verl, tmp_path, capsys):
    """Otherwise the resumed run would lack the rows of that batch."""
    fake_verl(3, every=1, program=SAVES_FIRST)
    with pytest.raises(EngineError, match="out of luck"):
        run(RECIPE, tmp_path)
    assert [is_marked(tmp_path / "checkpoints" / f"global_step_{batch}") for batch in (1, 2, 3)] == [True, True, False]
    fake_verl(every=1, program=SAVES_FIRST)
    resume(tmp_path)
    assert "resuming after step 4" in capsys.readouterr().err


def test_a_fake_verl_goes_on_from_the_checkpoint_before_lost_rows_and_records(died, capsys):
    metrics = died / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2]))
    resume(died)
    said = capsys.readouterr().err
    assert "global_step_3 is not used: metrics.jsonl has" in said
    assert "lost are the rows of step 6" in said
    assert "resuming after step 4" in said


def test_a_fake_verl_is_not_started_if_rows_before_every_checkpoint_are_lost_unless_that_is_accepted(died, capsys):
    (died / "evaluation.jsonl").unlink()
    (died / "verl.log").unlink()
    before = names_in(died)
    with pytest.raises(EngineError, match=r"evaluation\.jsonl is missing: lost are the rows of step 0.*--accept-loss"):
        run(RECIPE, died, resume=True)
    assert names_in(died) == before
    assert not (died / "verl.log").exists(), "verl was not started"
    resume(died, accept_loss=True)
    assert "resuming after step 6" in capsys.readouterr().err
    assert "rows of step 0" in RunDirectory(died).result()["lost"][0]


def test_a_commit_of_a_fake_verl_covers_the_batches_that_its_record_counts(fake_verl, tmp_path):
    (tmp_path / "records").mkdir()
    for batch in range(1, 5):
        (tmp_path / "records" / part_name(batch, 0)).write_text(f"batch {batch}")
    fake_verl(every=2)
    run(RECIPE, tmp_path)
    commits = [json.loads(line) for line in (tmp_path / "commits.jsonl").read_text().splitlines()]
    assert [(commit["step"], list(commit["files"])) for commit in commits[:2]] == [
        (4, [part_name(1, 0), part_name(2, 0)]),
        (8, [part_name(3, 0), part_name(4, 0)]),
    ]


@pytest.fixture
def of_0_1_0(died):
    """The same directory as trustrl 0.1.0 left it: no manifests, and no name of the run."""
    for manifest in (died / "checkpoints").glob(f"*/{MANIFEST}"):
        manifest.unlink()
    (died / "run_id").unlink()
    (died / "verl.log").unlink()
    return died


def test_a_fake_verl_s_checkpoint_of_release_0_1_0_is_loaded_on_request_only(of_0_1_0, capsys):
    before = names_in(of_0_1_0)
    with pytest.raises(
        ConfigError, match=r"no manifest, as trustrl 0\.1\.0 left it.*global_step_3.*--trust-checkpoint"
    ):
        run(RECIPE, of_0_1_0, resume=True)
    assert names_in(of_0_1_0) == before
    assert not (of_0_1_0 / "verl.log").exists(), "verl was not started"
    resume(of_0_1_0, trust_checkpoint=True)
    assert "resuming after step 6" in capsys.readouterr().err
    marked = [one for one in names_in(of_0_1_0) if is_marked(of_0_1_0 / "checkpoints" / one)]
    assert marked == ["global_step_4"], "only what this run wrote is signed"


@DAMAGE
def test_a_fake_verl_s_damaged_checkpoint_of_release_0_1_0_is_not_loaded_on_request_either(of_0_1_0, capsys, damage):
    damage(of_0_1_0 / "checkpoints" / "global_step_3" / "data.pt")
    resume(of_0_1_0, trust_checkpoint=True)
    said = capsys.readouterr().err
    assert "global_step_3 is not used: data.pt" in said
    assert "resuming after step 4" in said


@pytest.mark.parametrize("author", ["stranger", "new key", "other run"])
def test_a_fake_verl_s_checkpoint_by_another_author_is_loaded_on_request_only(died, author, monkeypatch, tmp_path):
    newest = died / "checkpoints" / "global_step_3"
    if author == "stranger":
        write_manifest(newest, Seal(Key(bytes(32)), RunDirectory(died).run_id))
    elif author == "new key":
        monkeypatch.setenv("TRUSTRL_KEY_FILE", str(tmp_path / "new"))
    else:
        (died / "run_id").write_text("b" * 32)
    (died / "verl.log").unlink()
    before, rows = names_in(died), RunDirectory(died).rows()
    said = (
        "wrote in another run" if author == "other run" else "signed, where yours is .*set TRUSTRL_KEY_FILE to a copy"
    )
    with pytest.raises(ConfigError, match=rf"{said}.*--trust-checkpoint"):
        run(RECIPE, died, resume=True)
    assert (names_in(died), RunDirectory(died).rows()) == (before, rows), "nothing is renamed or forgotten"
    assert not (died / "verl.log").exists(), "verl was not started"
    resume(died, trust_checkpoint=True)


def test_a_fake_verl_s_files_on_another_node_are_not_loaded_unverified(died):
    newest = died / "checkpoints" / "global_step_3"
    for rank in (0, 1, 3):
        (newest / "actor" / f"model_world_size_4_rank_{rank}.pt").write_bytes(b"")
    (newest / MANIFEST).unlink()
    write_manifest(newest, Seal(Key(Path(os.environ["TRUSTRL_KEY_FILE"]).read_bytes()), RunDirectory(died).run_id))
    with pytest.raises(ConfigError, match=r"without actor/model_world_size_4_rank_2\.pt.*file system that all nodes"):
        run(RECIPE, died, resume=True)


def test_a_checkpoint_that_a_fake_verl_had_not_completed_is_set_aside(died, capsys):
    (died / "checkpoints" / "global_step_4").mkdir()
    resume(died)
    assert "global_step_4 is not used: it was not complete" in capsys.readouterr().err


def test_a_number_that_was_cut_off_does_not_lose_the_checkpoints(died, capsys):
    (died / "checkpoints" / verl_run.TRACKER).write_text("")
    resume(died)
    assert "resuming after step 6" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_gone_stops(died):
    shutil.rmtree(died / "checkpoints")
    (died / "checkpoints").mkdir()
    (died / "checkpoints" / verl_run.TRACKER).write_text("3")
    before = RunDirectory(died).rows()
    with pytest.raises(EngineError, match="No intact checkpoint is left"):
        run(RECIPE, died, resume=True)
    assert RunDirectory(died).rows() == before


def test_a_checkpoint_that_others_can_write_is_not_given_to_verl_unless_trusted(died):
    (died / "checkpoints" / "global_step_3" / "data.pt").chmod(0o666)
    (died / "verl.log").unlink()
    with pytest.raises(ConfigError, match=r"data\.pt is writable by everybody.*--trust-checkpoint"):
        run(RECIPE, died, resume=True)
    assert not (died / "verl.log").exists(), "verl was not started"
    resume(died, trust_checkpoint=True)


@pytest.mark.parametrize("key", ["trainer.resume_from_path", "+trainer.resume_mode", "trainer.default_local_dir"])
def test_a_recipe_cannot_make_verl_load_another_checkpoint(key, tmp_path):
    recipe = replace(RECIPE, engine=replace(RECIPE.engine, settings={key: "/tmp/global_step_1"}))
    with pytest.raises(ConfigError, match=r"engine\.settings must leave out trainer"):
        run(recipe, tmp_path / "run")

"""`trustrl run` and `trustrl compare` with the real TRL: whole runs, killed and resumed runs, a grid."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("pyarrow")

from engines.rendezvous import own_environment
from trustrl import config_from_dict, preset
from trustrl.recording import read
from trustrl.runner.directory import RunDirectory
from trustrl.runner.trl_run import COMPLETE, last_checkpoint

ROOT = Path(__file__).parents[3]
STEPS = 6
SMALL = [
    f"schedule.steps={STEPS}", "schedule.checkpoint_every=2", "evaluation.count=16", "evaluation.every=3",
    "optimiser.learning_rate=3e-3",
]  # fmt: skip
OWN_CLOCK = {"seconds"}


def command(verb, *arguments):
    return [sys.executable, "-m", "trustrl.cli", verb, str(ROOT / "recipes/sanity.toml"), *map(str, arguments)]


def environment():
    return own_environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT / "src"))


def run(*arguments):
    return subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, check=False, timeout=400
    )


def measured(folder):
    """Metrics and evaluations without what depends on the clock."""
    directory = RunDirectory(folder)
    rows = [{key: value for key, value in row.items() if key not in OWN_CLOCK} for row in directory.rows()]
    return rows, directory.rows("evaluation")


def files_of_records(folder):
    return sorted(str(path.relative_to(folder)) for path in (folder / "records").rglob("*"))


def assert_same(folder, uninterrupted):
    """Metrics, evaluations and every recorded token."""
    assert measured(folder) == measured(uninterrupted)
    assert files_of_records(folder) == files_of_records(uninterrupted)
    assert read(folder / "records").table.equals(read(uninterrupted / "records").table)


@pytest.fixture(scope="module", params=["dppo-binary-tv", "troll"])
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
    assert [row["step"] for row in evaluations] == [0, 3, STEPS]
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


def killed_after(settings, folder, seconds):
    """A run that is killed, with no chance to tidy up; True unless it was done by then."""
    process = subprocess.Popen(
        command("run", *settings, "--out", folder, "--resume"), env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until_training = time.monotonic() + 120
    while process.poll() is None and not (folder / "evaluation.jsonl").exists() and time.monotonic() < until_training:
        time.sleep(0.02)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def test_a_run_killed_at_random_moments_and_resumed_ends_as_if_nothing_had_happened(whole, tmp_path):
    settings, uninterrupted = whole
    moments = random.Random(uninterrupted.parent.name)
    kills = [killed_after(settings, tmp_path / "run", moments.uniform(0.0, 2.0)) for _ in range(3)]
    assert any(kills), "no run was still going on when it was killed"
    done = run("run", *settings, "--out", tmp_path / "run", "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(tmp_path / "run", uninterrupted)


def test_a_run_killed_after_its_second_checkpoint_goes_on_from_there(whole, tmp_path):
    """Not at a random moment: the checkpoint must have been used."""
    settings, uninterrupted = whole
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command("run", *settings, "--out", folder), env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    marker = folder / "checkpoints" / "checkpoint-4" / COMPLETE
    while process.poll() is None and not marker.exists():
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        pytest.skip("it was done before it could be killed")
    (folder / "checkpoints" / "checkpoint-6").mkdir(exist_ok=True)  # as a kill while it is written would leave it
    (folder / "checkpoints" / "checkpoint-6" / COMPLETE).unlink(missing_ok=True)
    done = run("run", *settings, "--out", folder, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "goes on after step 4" in done.stderr
    assert_same(folder, uninterrupted)


def test_half_a_checkpoint_is_not_resumed_from(tmp_path):
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-2" / COMPLETE).touch()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert not (tmp_path / "checkpoint-4").exists()


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
    assert "holds a finished run" in done.stderr
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


def test_a_grid_of_two_regions_and_two_seeds(tmp_path):
    """At a learning rate this high an unconstrained update moves further than one inside a tight region."""
    settings = [
        *SMALL, "schedule.updates_per_batch=3", "schedule.checkpoint_every=3",
        "evaluation.every=0",
    ]  # fmt: skip
    more = ["--regions", "pg-is,dppo-binary-tv", "--seeds", "2", "--out", tmp_path / "grid"]
    done = run("compare", *settings, *more)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "grid" / "table.json").read_text())
    assert [(run["region"], run["seed"], run["finished"]) for run in found["runs"]] == [
        ("pg-is", 0, True), ("dppo-binary-tv", 0, True), ("pg-is", 1, True), ("dppo-binary-tv", 1, True),
    ]  # fmt: skip
    assert found["regions"]["pg-is"]["masked_share"]["mean"] == 0.0
    assert found["regions"]["dppo-binary-tv"]["masked_share"]["mean"] > 0.0
    first = {run["region"]: run["curves"]["reward"][0] for run in found["runs"] if run["seed"] == 0}
    assert first["pg-is"] == first["dppo-binary-tv"], "the same seed samples the same first batch"
    assert done.stdout == (tmp_path / "grid" / "table.md").read_text()
    again = run("compare", *settings, *more)
    assert again.returncode == 0
    assert "4 runs, 4 of them finished already" in again.stderr

"""The study for owners of GPUs: its recipes are accepted with every arm, and its verdicts follow the registered rules."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

from trustrl.runner.grid import cells
from trustrl.runner.recipe import load, load_arms

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "studies/12-on-gpus"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("gpu_study", FOLDER / "gpu_study.py")
    module = importlib.util.module_from_spec(spec)
    paths = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = paths


def written(study, root, accuracies, arms=None, rates=None):
    """Writes run folders as `trustrl compare` leaves them; `accuracies` gives those of an arm, rate and seed."""
    for task in study.TASKS:
        for rate in rates or study.RATES:
            for arm in arms or study.ARMS:
                for seed in range(study.SEEDS):
                    folder = study.folder_of(root, task, rate) / arm / f"seed-{seed}"
                    folder.mkdir(parents=True)
                    rows = [{"step": 80 * i, "accuracy": x} for i, x in enumerate(accuracies(arm, rate, seed))]
                    (folder / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
                    (folder / "result.json").write_text(json.dumps({"seconds": 3600.0}))
                    (folder / "environment.json").write_text(json.dumps({"python": "3.12"}))


def rising(arm, rate, seed):
    """TROLL is ahead by 0.1, capped Top-K equal to PPO; seeds differ more than arms do. No region falls at 1e-5."""
    ahead = {"troll": 0.1, "no-region": -0.1}.get(arm, 0.0) + random.Random(f"{arm}{seed}").gauss(0, 0.002)
    curve = [0.3 + 0.02 * i + 0.05 * seed + ahead for i in range(8)]
    return curve[:4] + [0.1] * 4 if rate > 1e-6 and arm == "no-region" else curve


@pytest.mark.parametrize("task", ["gsm8k", "dapo"])
def test_every_arm_is_accepted_by_the_plan(study, task, tmp_path):
    arms = load_arms(ROOT / "recipes/evidence/gpu-arms.toml")
    assert tuple(arms) == study.ARMS
    grid = cells(load(ROOT / f"recipes/evidence/gpu-{task}.toml"), arms, study.SEEDS, tmp_path)
    assert len(grid) == len(study.ARMS) * study.SEEDS
    assert {str(cell.folder.relative_to(tmp_path)) for cell in grid} == {
        f"{arm}/seed-{seed}" for arm in study.ARMS for seed in range(study.SEEDS)
    }


def test_the_command_trains_the_registered_runs(study, tmp_path):
    command = study.command(tmp_path, "dapo", 1e-5)
    assert command[1:5] == ["-m", "trustrl", "compare", str(ROOT / "recipes/evidence/gpu-dapo.toml")]
    assert "optimiser.learning_rate=1e-05" in command
    assert command[-1] == str(tmp_path / "dapo-1e-05")


def test_verdicts_follow_the_registered_rules(study, tmp_path):
    written(study, tmp_path, rising)
    text = study.judged(list(study.collected(tmp_path)))
    assert text.startswith("100 of 100 runs, 8 of 8 questions.")
    for question, verdict in (
        ("PPO against no region", "ahead"), ("TROLL against PPO", "ahead"),
        ("capped Top-K against PPO", "equal within 0.02"),
    ):  # fmt: skip
        (line,) = (line for line in text.splitlines() if f"gsm8k: {question}" in line)
        assert f"**{verdict}**" in line
    assert "| `no-region` | 0 of 10 | 0.00 [0.00, 0.31] |" in text
    assert "the study can speak about it" in text


def test_a_study_without_failures_cannot_speak_about_stability(study, tmp_path):
    written(study, tmp_path, lambda arm, rate, seed: rising(arm, 1e-6, seed))
    assert "the study cannot speak about it" in study.judged(list(study.collected(tmp_path)))


def test_a_part_of_the_runs_answers_the_questions_that_it_completes(study, tmp_path):
    written(study, tmp_path, rising, arms=("ppo", "no-region"), rates=(1e-6,))
    text = study.judged(list(study.collected(tmp_path)))
    assert text.startswith("20 of 100 runs, 2 of 8 questions.")
    assert "not judged before all runs" in text
    assert "TROLL" not in text


def test_an_unfinished_run_is_not_counted(study, tmp_path):
    written(study, tmp_path, rising, arms=("ppo",), rates=(1e-6,))
    (study.folder_of(tmp_path, "gsm8k", 1e-6) / "ppo/seed-3/result.json").unlink()
    assert len(list(study.collected(tmp_path))) == 9


def test_the_registration_has_the_values_of_the_code(study):
    text = (FOLDER / "REGISTRATION.md").read_text()
    assert f"seeds | 0 to {study.SEEDS - 1}" in text
    for value in (f"{study.HELD:g}", *(f"{rate:g}".replace("e-0", "e-") for rate in study.RATES), "0.02"):
        assert value in text
    assert study.verdicts.MARGIN == 0.02

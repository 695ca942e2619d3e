"""What upstream/ offers to verl: the recipe's settings are ones that verl composes, and the patch mends what its test shows."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

verl = pytest.importorskip("verl")

from hydra import compose, initialize_config_module

from trustrl.engines.verl.verl_config import check_settings, fill_in, region_of

UPSTREAM = Path(__file__).parents[3] / "upstream"
RECIPE = UPSTREAM / "verl-recipe/trust_region"
SCRIPT = RECIPE / "run_qwen3_4b_gsm8k.sh"
PATCH = UPSTREAM / "patches/verl-dppo-max-ratio"
MODES = re.findall(r"^\| `(trustrl-[\w-]+)`", (RECIPE / "README.md").read_text(), re.M)


def arguments(folder, *more, **variables):
    """The arguments that the script gives to Python, which is a stub here."""
    stub = folder / "python3"
    stub.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder / "arguments"}\n')
    stub.chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables
    subprocess.run(["bash", SCRIPT, *more], env=env, check=True, capture_output=True)
    return (folder / "arguments").read_text().splitlines()


def test_the_readme_names_the_verl_that_is_installed():
    assert len(MODES) >= 4
    for file in (RECIPE / "README.md", RECIPE / "REQUIRED_VERL.txt"):
        assert f"verl=={version('verl')}" in file.read_text()


@pytest.mark.parametrize("mode", [None, *MODES])
def test_verl_composes_the_scripts_settings_and_takes_four_updates(mode, tmp_path):
    given = arguments(tmp_path, "trainer.n_gpus_per_node=4", **({"LOSS_MODE": mode} if mode else {}))
    assert given[:2] == ["-m", "trustrl.engines.verl"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=given[2:])
    fill_in(config)
    actor = config.actor_rollout_ref.actor
    assert check_settings(config) == region_of(mode or MODES[0], actor.policy_loss)
    assert config.data.train_batch_size == 4 * actor.ppo_mini_batch_size
    assert config.trainer.n_gpus_per_node == 4


def test_the_patch_mends_what_its_test_shows(tmp_path):
    copy = tmp_path / "verl"
    shutil.copytree(Path(verl.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert outcome(tmp_path) == "2 failed, 3 passed"
    subprocess.run(["git", "apply", PATCH / "fix.patch"], cwd=tmp_path, check=True)
    assert outcome(tmp_path) == "5 passed"


def outcome(folder):
    """The last line of the patch's test, with the verl in this folder."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, PATCH],
        env=os.environ | {"PYTHONPATH": str(folder)}, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.splitlines()[-1].partition(" in ")[0]

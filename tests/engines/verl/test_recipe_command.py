"""A recipe's command line is one that verl's own configuration takes: composed by hydra, nothing started."""

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl")

from trustrl.runner.recipe import load
from trustrl.runner.verl_settings import command

ROOT = Path(__file__).parents[3]
RECIPES = [file for file in sorted((ROOT / "recipes").glob("*.toml")) if load(file).engine.name == "verl"]
IN_FULL = ["region.preset=dppo-topk-tv", "region.divergence.max_increase=0.2", "region.anchor=proximal"]


@pytest.mark.parametrize("overrides", [[], IN_FULL], ids=["as it is", "a region in full"])
@pytest.mark.parametrize("file", RECIPES, ids=[file.stem for file in RECIPES])
def test_verl_composes_the_command_of_every_recipe(file, overrides, tmp_path):
    recipe = load(file, overrides)
    made = subprocess.run(
        [*command(recipe, tmp_path, recipe.model.name), "--cfg", "job"], capture_output=True, text=True, check=False,
        timeout=200, cwd=tmp_path,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-3000:]
    assert f"ppo_mini_batch_size: {recipe.schedule.prompts_per_step}" in made.stdout
    if overrides:
        assert "max_increase: 0.2" in made.stdout
        assert "loss_mode: trustrl\n" in made.stdout


def test_a_setting_that_verl_does_not_have_is_refused_by_verl(tmp_path):
    recipe = load(ROOT / "recipes/verl-tour.toml", ["engine.settings.trainer.no_such_thing=1"])
    made = subprocess.run(
        [*command(recipe, tmp_path, "x/y"), "--cfg", "job"], capture_output=True, text=True, check=False, timeout=200
    )
    assert made.returncode != 0
    assert "no_such_thing" in made.stderr

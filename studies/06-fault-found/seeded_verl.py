"""Seeded faults in verl: `trustrl run` on verl, or verl's own `main_ppo` with its own loss, with one fault.

    python studies/06-fault-found/seeded_verl.py NAME FOLDER

`seeded_verl_server.py` breaks the sampler, `seeded_verl_reward.py` the reward.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
from faults import ALL, FAULTS, seed_of
from pyarrow import parquet

from trustrl.runner.recipe import Recipe, load
from trustrl.runner.verl_cpu_settings import PLAIN_PROMPTS, PLUGIN
from trustrl.world import models
from trustrl.world.verl_dataset import write_parquet
from trustrl_verl_cpu.cpu_defaults import ENVIRONMENT, with_defaults

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"
BATCHES = 8
PROMPTS = 8
SIZE = [f"schedule.prompts_per_step={PROMPTS}", "evaluation.count=64", "task.problems=800"]
REWARD = "reward.custom_reward_function.path"
LOSS = "actor_rollout_ref.actor.policy_loss"
UNCHECKED = [
    f"engine.settings.{LOSS}._target_=trustrl.engines.verl.RegionLossConfig",
    f"engine.settings.+{LOSS}.startup_checks=false",
]
"""Settings without the check of the first ratio, which would reject most faults of the sampler."""


def updates_of(name: str) -> int:
    return next((int(one.split("=")[1]) for one in ALL[name].settings if "updates_per_batch" in one), 2)


def recipe_of(name: str) -> Recipe:
    wanted, steps = ALL[name], BATCHES * updates_of(name)
    settings = [one for one in wanted.settings if not one.startswith("mask_truncated")]  # TRL's
    return load(
        str(RECIPES / "verl-tour.toml"),
        ["region.preset=dppo-binary-tv", f"schedule.steps={steps}", f"schedule.checkpoint_every={steps}", *SIZE,
         f"engine.settings.{REWARD}={HERE / 'seeded_verl_reward.py'}", *settings, f"name={name}",
         f"schedule.seed={seed_of(name)}", *(UNCHECKED if wanted.fault else [])],
    )  # fmt: skip


def environment(name: str, folder: Path) -> dict[str, str]:
    """Returns the variables that break the sampler and the reward in every process of verl."""
    wanted = {**ALL[name].fault, "seed": seed_of(name)}
    if name in FAULTS:
        schedule = recipe_of(name).schedule
        in_batch = schedule.prompts_per_batch * schedule.completions_per_prompt
        wanted |= {"counted": str(folder / "completions-counted"), "in_batch": in_batch, "batches": BATCHES}
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    modules = "seeded_verl_server"
    return {**os.environ, "SEEDED_FAULT": json.dumps(wanted), "PYTHONPATH": path, "VERL_USE_EXTERNAL_MODULES": modules}


def stock_command(name: str, folder: Path) -> list[str]:
    """Returns verl's own command, with the settings that a CPU needs."""
    recipe = recipe_of(name)
    schedule, count = recipe.schedule, recipe.evaluation.count
    problems = ALL[name].fault.get("problems", recipe.task.problems)
    files = [
        write_parquet(folder / f"{split}.parquet", recipe.task.name, split, count=number, seed=schedule.seed)
        for split, number in (("train", problems), ("held_out", count))
    ]
    repeat(files[0], recipe.task.problems // problems)
    return [
        sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo",
        *with_defaults([
            PLAIN_PROMPTS, f"data.train_files={files[0]}", f"data.val_files={files[1]}", f"data.seed={schedule.seed}",
            f"data.train_batch_size={schedule.prompts_per_batch}",
            f"data.max_prompt_length={schedule.max_prompt_tokens}",
            f"data.max_response_length={schedule.max_completion_tokens}",
            f"actor_rollout_ref.model.path={models.path(recipe.model.name)}",
            "actor_rollout_ref.rollout.name=transformers_cpu", f"actor_rollout_ref.rollout.seed={schedule.seed}",
            f"actor_rollout_ref.rollout.n={schedule.completions_per_prompt}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={schedule.prompts_per_step}",
            f"actor_rollout_ref.actor.optim.lr={recipe.optimiser.learning_rate}",
            f"actor_rollout_ref.actor.fsdp_config.seed={schedule.seed}",
            "actor_rollout_ref.actor.calculate_entropy=True",
            f"trainer.rollout_data_dir={folder / 'rollouts'}",
            f"trainer.total_training_steps={BATCHES}", "trainer.logger=[file]", "trainer.save_freq=-1",
            "trainer.test_freq=-1", f"trainer.default_local_dir={folder / 'checkpoints'}",
            f"{REWARD}={HERE / 'seeded_verl_reward.py'}", f"hydra.run.dir={folder / 'hydra'}",
        ]),
    ]  # fmt: skip


def repeat(file: Path, copies: int) -> None:
    """Writes every row of a file several times."""
    table = parquet.read_table(file)
    parquet.write_table(pyarrow.concat_tables([table] * copies), file)


def main(name: str, folder: Path) -> int:
    """Makes one run and returns its exit code."""
    variables = environment(name, folder)
    if ALL[name].engine == "verl":
        os.environ.update(variables)
        from trustrl.runner.run_recipe import run

        run(recipe_of(name), folder, resume=True)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    variables = {**variables, **ENVIRONMENT, "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
    variables["VERL_USE_EXTERNAL_MODULES"] = f"{PLUGIN},seeded_verl_server"
    if name in FAULTS:
        variables["VERL_USE_EXTERNAL_MODULES"] += ",trustrl.engines.verl"
        variables["TRUSTRL_RECORD"] = str(folder / "records")
    return subprocess.run(stock_command(name, folder), env=variables, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]).resolve()))

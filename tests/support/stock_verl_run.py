"""A stock verl run of three steps without a GPU: `python -m support.stock_verl_run OUT`. Only the CPU plugin is ours."""

import os
import subprocess
import sys
from pathlib import Path

from support.rendezvous import python_path
from support.tiny_models import save_model
from trustrl.runner.verl_cpu_settings import PLAIN_PROMPTS, PLUGIN
from trustrl.world.verl_dataset import write_parquet
from trustrl_verl_cpu.cpu_defaults import ENVIRONMENT, with_defaults

STEPS, GROUP, PROMPTS, UPDATES, HELD_OUT = 3, 4, 8, 2, 8
REWARD = Path(__file__).parents[1] / "engines/verl_cpu/verl_letters_reward.py"


def train(out):
    """Trains with verl's own loss, and its console, file and TensorBoard loggers; returns the exit code."""
    out = Path(out).resolve()
    save_model(out / "model", tied=True)
    write_parquet(out / "train.parquet", "arithmetic", "train", count=64)
    write_parquet(out / "held_out.parquet", "arithmetic", "held_out", count=HELD_OUT)
    given = [
        f"data.train_files={out}/train.parquet", f"data.val_files={out}/held_out.parquet",
        f"data.train_batch_size={PROMPTS}", "data.max_prompt_length=16", "data.max_response_length=8",
        f"actor_rollout_ref.model.path={out}/model", "actor_rollout_ref.rollout.name=transformers_cpu",
        f"actor_rollout_ref.rollout.n={GROUP}", f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // UPDATES}",
        "actor_rollout_ref.actor.optim.lr=3e-3", f"trainer.total_training_steps={STEPS}", "trainer.test_freq=2",
        "trainer.val_before_train=True", "trainer.logger=[console,file,tensorboard]", "trainer.project_name=stock",
        "trainer.experiment_name=verl-stock", f"trainer.rollout_data_dir={out}/rollouts", "trainer.save_freq=-1",
        f"trainer.validation_data_dir={out}/validation", f"hydra.run.dir={out}/hydra", PLAIN_PROMPTS,
        f"reward.custom_reward_function.path={REWARD}",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES={PLUGIN}",
    ]  # fmt: skip
    environment = os.environ | ENVIRONMENT | {
        "VERL_USE_EXTERNAL_MODULES": PLUGIN, "VERL_FILE_LOGGER_PATH": f"{out}/metrics.jsonl", "HF_HUB_OFFLINE": "1",
        "TENSORBOARD_DIR": f"{out}/tensorboard", "PYTHONPATH": python_path(),
    }  # fmt: skip
    with (out / "console.log").open("wb") as log:
        return subprocess.run(
            [sys.executable, "-m", "verl.trainer.main_ppo", *with_defaults(given)], env=environment, stdout=log,
            stderr=subprocess.STDOUT, cwd=out, timeout=800, check=False,
        ).returncode  # fmt: skip


if __name__ == "__main__":
    sys.exit(train(sys.argv[1]))

"""Runs of a few steps on verl's `main_ppo` and Ray, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

from support.tiny_models import save_model

ROOT = Path(__file__).parents[2]
STEPS = 3
SMALL = [
    f"schedule.steps={STEPS}", f"schedule.checkpoint_every={STEPS}", "schedule.prompts_per_step=8",
    "schedule.completions_per_prompt=4", "schedule.updates_per_batch=1", "schedule.max_prompt_tokens=16",
    "schedule.max_completion_tokens=8", "optimiser.learning_rate=3e-3", "evaluation.count=8", "task.problems=64",
    "records.sample=1",
    f"engine.settings.reward.custom_reward_function.path={ROOT / 'tests/engines/verl_cpu/verl_letters_reward.py'}",
]  # fmt: skip


def trained(folder, settings, experts=0, **environment):
    """Trains a random tiny model in `folder`/run with a small recipe; returns the exit code and what was said."""
    model = folder / "model"
    save_model(model, tied=not experts, experts=experts)
    command = [
        sys.executable, "-m", "trustrl.cli", "run", str(ROOT / "recipes/verl-tour.toml"), f"model.name={model}", *SMALL,
        *(one.format(model=model) for one in settings), "--out", str(folder / "run"),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=900)
    finally:
        if process.poll() is None:
            process.kill()  # verl and Ray end with it
    return process.returncode, said

"""Runs of a few steps on verl's `main_ppo` and Ray, without a GPU."""

import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq

from support.sockets import listening, tree
from support.tiny_models import save_model
from trustrl.runner.verl_cpu_settings import PLAIN_PROMPTS, PLUGIN
from trustrl.world.verl_dataset import write_parquet
from trustrl_verl_cpu.cpu_defaults import ENVIRONMENT, with_defaults

ROOT = Path(__file__).parents[2]
STEPS = 3
SMALL = [
    f"schedule.steps={STEPS}", f"schedule.checkpoint_every={STEPS}", "schedule.prompts_per_step=8",
    "schedule.completions_per_prompt=4", "schedule.updates_per_batch=1", "schedule.max_prompt_tokens=16",
    "schedule.max_completion_tokens=8", "optimiser.learning_rate=3e-3", "evaluation.count=8", "task.problems=64",
    "records.sample=1",
    f"engine.settings.reward.custom_reward_function.path={ROOT / 'tests/engines/verl_cpu/verl_letters_reward.py'}",
]  # fmt: skip

V1, ROLLOUT = "engine.settings.trainer.v1", "engine.settings.actor_rollout_ref.rollout"
SEPARATE = [
    f"{V1}.separate_async.parameter_sync_step=1", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1",
    "engine.settings.+ray_kwargs.ray_init.num_gpus=2",
]  # fmt: skip
"""verl's `separate_async` mode with one update per sync: a second sampler, which does not pause while it trains."""


def logged_run(folder, mode, settings, server, **more):
    """Trains in one of verl's modes with the server of a module next to the test, which writes `folder`/sampler.jsonl.

    Returns the folder of the run.
    """
    module = Path(server)
    here = os.pathsep.join([str(module.parent), os.environ.get("PYTHONPATH", "")])
    code, words = trained(
        folder, [f"{V1}.trainer_mode={mode}", *settings], PYTHONPATH=here, VERL_USE_EXTERNAL_MODULES=module.stem,
        TRUSTRL_TEST_LOG=str(folder / "sampler.jsonl"), **more,
    )  # fmt: skip
    assert code == 0, words[-6000:]
    return folder / "run"


def sequences_of(run):
    """Each recorded sequence of a run: its rows in order."""
    sequences = defaultdict(list)
    for file in sorted((run / "records").glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            sequences[row["sequence"]].append(row)
    return [sorted(rows, key=lambda row: row["position"]) for rows in sequences.values()]


def trained(folder, settings, experts=0, listened=None, seconds=900, **environment):
    """Trains a random tiny model in `folder`/run with a small recipe; returns the exit code and what was said.

    `listened` is a set, which gets every address on which a process of the run listened.
    """
    model = folder / "model"
    save_model(model, tied=not experts, experts=experts)
    command = [
        sys.executable, "-m", "trustrl.cli", "run", str(ROOT / "recipes/verl-tour.toml"), f"model.name={model}", *SMALL,
        *(one.format(model=model) for one in settings), "--out", str(folder / "run"),
    ]  # fmt: skip
    return said(command, listened, seconds, **environment)


def said(command, listened=None, seconds=900, **environment):
    """Returns the exit code of a command and what it said."""
    process = subprocess.Popen(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if listened is not None:
        threading.Thread(target=_watch, args=(process, listened), daemon=True).start()
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            process.kill()  # verl and Ray end with it
    return process.returncode, output


def _watch(process, listened):
    while process.poll() is None:
        listened |= listening(*tree(process.pid))
        time.sleep(0.5)


def stock(folder, *settings, steps=STEPS, **environment):
    """Trains a random tiny model on verl's own `main_ppo` with its `vanilla` loss; returns exit code and what was said.

    A CPU needs the platform and the sampler of `trustrl_verl_cpu`, and their settings.
    """
    model, data = folder / "model", folder / "train.parquet"
    save_model(model, tied=True)
    write_parquet(data, "arithmetic", "train", count=64)
    given = [
        f"data.train_files={data}", f"data.val_files={data}", "data.train_batch_size=8", "data.max_prompt_length=16",
        "data.max_response_length=8", f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.name=transformers_cpu", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=3e-3", "actor_rollout_ref.actor.calculate_entropy=True",
        f"reward.custom_reward_function.path={ROOT / 'tests/engines/verl_cpu/verl_letters_reward.py'}",
        "actor_rollout_ref.rollout.seed=0", f"trainer.total_training_steps={steps}", "trainer.test_freq=-1",
        "trainer.save_freq=-1", f"trainer.default_local_dir={folder / 'checkpoints'}", "hydra.run.dir=" + str(folder),
        PLAIN_PROMPTS, *settings,
    ]  # fmt: skip
    modules = [PLUGIN, *filter(None, [environment.pop("modules", "")])]
    return said(
        [sys.executable, "-m", "verl.trainer.main_ppo", *with_defaults(given)],
        **ENVIRONMENT, VERL_USE_EXTERNAL_MODULES=",".join(modules), **environment,
    )  # fmt: skip

"""Runs of a few steps on verl's `main_ppo`, Ray and Megatron, without a GPU; on GPUs for `tests/gpu`."""

import json
import os
import subprocess
import sys
from pathlib import Path

from support.devices import ON_GPU
from support.tiny_models import save_model
from trustrl.runner.verl_cpu_settings import PLAIN_PROMPTS
from trustrl.world import verl_dataset

ROOT = Path(__file__).parents[2]
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SMALL = [
    "data.train_batch_size=8", "data.max_prompt_length=16", "data.max_response_length=8", PLAIN_PROMPTS,
    f"{ROLLOUT}.n=4", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.strategy=megatron",
    f"reward.custom_reward_function.path={ROOT / 'tests/engines/verl_cpu/verl_letters_reward.py'}",
    "algorithm.rollout_correction.bypass_mode=True", "trainer.logger=[file]",
]  # fmt: skip
WITH_GPUS = [
    "algorithm.adv_estimator=grpo", f"{ROLLOUT}.calculate_log_probs=True", f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=4096", f"{ROLLOUT}.gpu_memory_utilization=0.3", f"{ROLLOUT}.enforce_eager=True",
    f"{ROLLOUT}.tensor_model_parallel_size=1", "trainer.val_before_train=False", "trainer.resume_mode=disable",
]  # fmt: skip
"""What `trustrl_verl_cpu` sets by itself, as far as a GPU needs it."""
REPLAY = [f"{ACTOR}.megatron.router_replay.mode=R3", f"{ROLLOUT}.enable_rollout_routing_replay=True"]
"""The trainer takes the routes that the sampler's tokens took."""


def prepare(folder, *, experts=0, seed=0):
    """Saves a random tiny model and its problems in the folder."""
    router = {"norm_topk_prob": True} if experts else {}  # mbridge knows no other router of Qwen3-MoE
    save_model(folder / "model", tied=not experts, experts=experts, seed=seed, num_key_value_heads=2, **router)
    verl_dataset.main(["arithmetic", str(folder / "train.parquet"), "--count", "64"])
    verl_dataset.main(["arithmetic", str(folder / "held_out.parquet"), "--split", "held_out", "--count", "8"])


def trained(folder, settings, seconds=900, **environment):
    """Trains in a prepared folder, or goes on there; returns the metrics of each step and what was said."""
    log = folder / "metrics.jsonl"
    log.unlink(missing_ok=True)
    group = ["model_engine=megatron"] if f"{ACTOR}.strategy=fsdp2" not in settings else []
    module = ["trustrl.engines.verl", *WITH_GPUS, *group] if ON_GPU else ["trustrl_verl_cpu"]
    command = [
        sys.executable, "-m", *module, *SMALL, f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'held_out.parquet'}", f"actor_rollout_ref.model.path={folder / 'model'}",
        f"trainer.default_local_dir={folder / 'checkpoints'}", f"hydra.run.dir={folder / 'hydra'}", *settings,
    ]  # fmt: skip
    given = os.environ | {"HF_HUB_OFFLINE": "1", "VERL_FILE_LOGGER_PATH": str(log)} | environment
    process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            process.kill()  # verl and Ray end with it
    assert process.returncode == 0, said[-6000:]
    return [json.loads(line) for line in log.read_text().splitlines()], said

"""verl's `main_ppo` on Ray, end to end: the sampler starts from random weights, so every ratio of 1 is a sync that worked."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

from engines.vllm.tiny import save_model
from trustrl.engines.seam import version_of
from trustrl.engines.verl_cpu.vllm_environment import VARIABLE
from trustrl.engines.verl_data import write_parquet

STEPS = 3

pytestmark = pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")


def train(folder, *settings):
    """Every step's metrics; the model is random and is rewarded for some letters more than for others."""
    save_model(folder / "model", tied=True)
    data = {
        split: write_parquet(folder / f"{split}.parquet", "arithmetic", split, count=64)
        for split in ("train", "held_out")
    }
    command = [
        sys.executable, "-m", "trustrl.engines.verl_cpu",
        f"data.train_files={data['train']}", f"data.val_files={data['held_out']}", "data.train_batch_size=8",
        "data.max_prompt_length=16", "data.max_response_length=8", "actor_rollout_ref.rollout.n=4",
        f"actor_rollout_ref.model.path={folder / 'model'}", "--plain-prompts",
        f"reward.custom_reward_function.path={Path(__file__).with_name('verl_letters_reward.py')}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.optim.lr=3e-3",
        "trainer.logger=[file]", f"trainer.total_training_steps={STEPS}",
        f"hydra.run.dir={folder / 'hydra'}", *settings,
    ]  # fmt: skip
    environment = os.environ | {"VERL_FILE_LOGGER_PATH": str(folder / "steps.jsonl"), "HF_HUB_OFFLINE": "1"}
    # A session of its own: Ray's processes must not outlive a run that hangs.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        cwd=folder,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-6000:]
    lines = (folder / "steps.jsonl").read_text().splitlines()
    return [line["data"] for line in map(json.loads, lines) if "actor/grad_norm" in line["data"]]


LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
CRITIC = [
    "algorithm.adv_estimator=gae", "critic.model.path={folder}/model", "critic.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.entropy_coeff=0.001",
]  # fmt: skip


@pytest.mark.parametrize(
    ("sampler", "settings", "also"),
    [
        pytest.param(
            "transformers_cpu", ["trainer.n_gpus_per_node=2", f"{LOSS}=trustrl-troll", *CRITIC],
            {"critic/vf_loss", "actor/kl_loss", "actor/entropy_loss", "actor/trustrl/projected_share"},
            id="TROLL: transformers, two ranks, a critic and a reference",
        ),
        pytest.param(
            "vllm_cpu", ["actor_rollout_ref.rollout.temperature=0.8", f"{LOSS}=trustrl-dppo-topk-tv", BYPASS],
            {"actor/trustrl/divergence_mean", "actor/trustrl/undecided_share"}, id="Top-K: vLLM at temperature 0.8",
        ),
    ],
)  # fmt: skip
def test_every_step_begins_with_the_policy_that_sampled(sampler, settings, also, tmp_path):
    if sampler == "vllm_cpu" and not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} is not set")
    settings = [one.format(folder=tmp_path) for one in settings]
    steps = train(tmp_path, f"actor_rollout_ref.rollout.name={sampler}", *settings)
    assert len(steps) == STEPS
    assert steps[0]["actor/grad_norm"] > 1e-3  # so that later ratios are those of weights that moved
    for step in steps:
        assert step["actor/trustrl/gap_abs_mean"] < 1e-4
        assert abs(step["actor/trustrl/ratio_mean"] - 1) < 1e-4
        assert abs(step["actor/ppo_kl"]) < 1e-4
        assert step["actor/trustrl/tokens"] > 0
        assert also <= step.keys(), sorted(also - step.keys())

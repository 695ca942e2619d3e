"""verl's `main_ppo` on Ray with Megatron, a mixture of experts on two ranks, a real vLLM and router replay; then resumed."""

import os

import pytest

pytest.importorskip("verl")
pytest.importorskip("megatron.core")
pytest.importorskip("pyarrow")

from safetensors.torch import load_file

from support.rendezvous import python_path
from support.verl_megatron_runs import ACTOR, REPLAY, ROLLOUT, prepare, trained
from trustrl_verl_cpu.vllm_server import VARIABLE

STEPS, LEARNING_RATE = 2, 3e-3
SETTINGS = [
    f"{ROLLOUT}.name=vllm_cpu", "trainer.n_gpus_per_node=2",
    f"trainer.save_freq={STEPS}", f"{ACTOR}.optim.lr={LEARNING_RATE}", *REPLAY,
    f"{ACTOR}.policy_loss._target_=trustrl.engines.verl.RegionLossConfig", f"+{ACTOR}.policy_loss.metrics=all",
]  # fmt: skip
TOPK, TROLL = (f"{ACTOR}.policy_loss.loss_mode=trustrl-{preset}" for preset in ("dppo-topk-tv", "troll"))
BY_EXPERTS = [f"{ACTOR}.megatron.expert_model_parallel_size=2"]
BY_TENSORS = [f"{ACTOR}.megatron.tensor_model_parallel_size=2"]

pytestmark = [
    pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{VARIABLE} is not set"),
    pytest.mark.xdist_group("run"),
]


def weights(folder, step):
    return load_file(folder / f"checkpoints/global_step_{step}/actor/model/huggingface/model.safetensors")


def check(row):
    """The first ratio of a step is that of the sampler's weights and the trainer's."""
    data = row["data"]
    assert abs(data["actor/trustrl/ratio_mean"] - 1) < 1e-4
    assert abs(data["actor/trustrl/ratio_max"] - 1) < 1e-4
    assert data["actor/trustrl/staleness_max"] == 0
    assert data["actor/trustrl/tokens"] > 0
    assert 0 < data["critic/score/mean"] < 1
    assert data["actor/grad_norm"] > 1e-3


EXPERTS = [*SETTINGS, *BY_EXPERTS, TOPK]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, and its metrics."""
    folder = tmp_path_factory.mktemp("megatron")
    prepare(folder, experts=4)
    rows, said = trained(folder, [*EXPERTS, f"trainer.total_training_steps={STEPS}"])
    assert "routing replay layers: 2" in said
    return folder, rows


def test_every_step_begins_with_the_policy_that_sampled(run):
    _, rows = run
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        check(row)


@pytest.mark.long
def test_a_resumed_run_goes_on_from_the_weights_of_its_checkpoint(run):
    """Resumed where the model's folder has another model."""
    folder, _ = run
    prepare(folder, experts=4, seed=1)
    resumed, _ = trained(folder, [*EXPERTS, "trainer.resume_mode=auto", f"trainer.total_training_steps={STEPS + 1}"])
    assert [row["step"] for row in resumed] == [STEPS + 1]
    check(resumed[0])
    start = load_file(folder / "model/model.safetensors")
    saved, after = weights(folder, STEPS), weights(folder, STEPS + 1)
    assert start.keys() == saved.keys() == after.keys()
    for name, weight in saved.items():
        assert 0 < (after[name] - weight).abs().max() < 3 * LEARNING_RATE, name  # one update of Adam
    assert (start["lm_head.weight"] - after["lm_head.weight"]).abs().max() > 0.5


@pytest.mark.long
def test_twenty_steps_raise_the_reward_and_leave_no_gap(tmp_path):
    prepare(tmp_path, experts=4)
    rows, _ = trained(tmp_path, [*SETTINGS, *BY_TENSORS, TROLL, "trainer.total_training_steps=20"], seconds=1800)
    assert [row["step"] for row in rows] == list(range(1, 21))
    for row in rows:
        check(row)
    rewards = [row["data"]["critic/score/mean"] for row in rows]
    print("rewards", rewards, "largest gap", max(row["data"]["actor/trustrl/gap_max"] for row in rows))
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])


@pytest.mark.long
def test_the_trainer_takes_other_routes_if_it_is_given_others(tmp_path):
    """In float32 both sides choose the same experts, so a ratio of 1 alone does not show that anything is replayed."""
    prepare(tmp_path, experts=4)
    unchecked = [f"+{ACTOR}.policy_loss.startup_checks=False", "trainer.total_training_steps=1"]
    loaded = {"VERL_USE_EXTERNAL_MODULES": "support.verl_other_routes", "PYTHONPATH": python_path()}
    rows, _ = trained(tmp_path, [*SETTINGS, *BY_EXPERTS, TOPK, *unchecked], seconds=1800, **loaded)
    gap = rows[0]["data"]["actor/trustrl/gap_abs_mean"]
    print("mean |π − μ| on other routes", gap)
    assert gap > 100 * 1e-4  # a hundred times what `check` allows

"""verl's `main_ppo` on Ray with vLLM, on FSDP2 and on Megatron: every step begins with the policy that sampled."""

import os

import pytest

pytest.importorskip("verl")

from support.devices import ON_GPU, need_ranks
from support.verl_megatron_runs import ACTOR, ROLLOUT, prepare, trained

VLLM_PYTHON = "TRUSTRL_VLLM_PYTHON"
LARGEST_GAP = 0.05 if ON_GPU else 1e-4
"""Of the mean ratio from 1. On GPUs both sides compute in bf16, with different kernels."""

pytestmark = pytest.mark.skipif(
    not ON_GPU and not os.environ.get(VLLM_PYTHON), reason=f"{VLLM_PYTHON}, the Python that has vLLM, is not set"
)


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_every_step_begins_with_the_policy_that_sampled(strategy, tmp_path):
    if strategy == "megatron":
        pytest.importorskip("megatron.core")
    need_ranks(2)
    prepare(tmp_path)
    rows, _ = trained(
        tmp_path,
        [
            f"{ACTOR}.strategy={strategy}", f"{ROLLOUT}.name={'vllm' if ON_GPU else 'vllm_cpu'}",
            "trainer.n_gpus_per_node=2", "trainer.total_training_steps=2",
            f"{ACTOR}.policy_loss._target_=trustrl.engines.verl.RegionLossConfig",
            f"{ACTOR}.policy_loss.loss_mode=trustrl-dppo-topk-tv", f"+{ACTOR}.policy_loss.metrics=all",
        ],
    )  # fmt: skip
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        data = row["data"]
        assert data["actor/trustrl/tokens"] > 0
        assert abs(data["actor/trustrl/ratio_mean"] - 1) < LARGEST_GAP
        assert data["actor/trustrl/staleness_max"] == 0

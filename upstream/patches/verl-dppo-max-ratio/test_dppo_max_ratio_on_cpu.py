"""The largest importance ratio of verl's DPPO losses, and the constant of dual-clip PPO, on a CPU."""

import math

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig


def gradient(loss_mode, ratio, advantage=1.0, **settings):
    """Returns -dL/dlog π of one token with this ratio: its advantage times the weight that the loss gives it."""
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=1, global_batch_size=1, loss_scale_factor=None)
    old = torch.tensor([[-10.0]])
    new = (old + math.log(ratio)).requires_grad_()
    mask, advantages = torch.ones(1, 1), torch.full((1, 1), advantage)
    loss, _ = get_policy_loss_fn(loss_mode)(old, new, advantages, mask, "token-mean", config)
    loss.backward()
    return -new.grad.item()


@pytest.mark.parametrize("loss_mode", ["dppo_tv", "dppo_kl"])
def test_dppo_truncates_at_20_by_default(loss_mode):
    assert gradient(loss_mode, 15.0) == pytest.approx(15.0, rel=1e-4)
    assert gradient(loss_mode, 25.0) == pytest.approx(20.0, rel=1e-4)


@pytest.mark.parametrize("loss_mode", ["dppo_tv", "dppo_kl"])
def test_a_truncation_that_is_set_is_used(loss_mode):
    assert gradient(loss_mode, 15.0, clip_ratio_c=5.0) == pytest.approx(5.0, rel=1e-4)


def test_dual_clip_ppo_keeps_3():
    assert gradient("vanilla", 2.5, advantage=-1.0) == pytest.approx(-2.5, rel=1e-4)
    assert gradient("vanilla", 3.5, advantage=-1.0) == 0

"""A region as SkyRL's loss: one wait per micro-batch, because SkyRL takes metrics as Python numbers."""

import pytest

pytest.importorskip("skyrl")

from skyrl.backends.skyrl_train.utils import ppo_utils

from support import skyrl_world as world
from support.device_counts import counted

MOST_KERNELS = {"trustrl-dppo-binary-tv": 314, "trustrl-ppo": 292, "trustrl-minirl": 304}
"""Kernels of a loss and its metrics. Lower them with the core's."""


def counts_of(name):
    tokens = world.batch()
    config = world.algorithm(name, metrics="core")
    logp = tokens.log_probs.clone().requires_grad_()
    loss = ppo_utils.PolicyLossRegistry.get(name)
    with counted("skyrl") as counts:
        _, metrics = loss(
            logp,
            tokens.old_log_probs,
            tokens.advantages,
            config=config,
            loss_mask=tokens.loss_mask,
            rollout_logprobs=tokens.rollout_logprobs,
        )
    return counts, metrics


@pytest.mark.parametrize("name", MOST_KERNELS)
def test_a_loss_waits_once_for_all_its_metrics(name):
    counts, metrics = counts_of(name)
    assert {place.function: number for place, number in counts.waits.items()} == {"on_host": 1}, str(counts)
    assert not counts.copies, str(counts)
    assert sum(counts.kernels.values()) <= MOST_KERNELS[name], str(counts)
    # SkyRL's `reduce_metrics` leaves out whatever is not a number.
    assert all(type(value) is float for value in metrics.values())


def test_skyrls_own_loss_waits_for_its_metrics():
    """The counters see the engine's lines."""
    counts, metrics = counts_of("regular")
    assert sum(counts.waits.values()) >= len(metrics) >= 1
    assert all(place.file.startswith("skyrl/") for place in counts.waits)

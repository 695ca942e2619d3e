"""Regions in miles: its own `loss_function` calls ours, with real process groups on one rank."""

import pytest

losses = pytest.importorskip(
    "miles.backends.training_utils.loss_hub.losses", reason="miles' checkout must be on the path; see `nox -s sources`"
)

import torch.distributed as dist
from miles.backends.training_utils import loss as dispatcher
from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
from miles.utils.ft_utils.process_group_utils import GroupInfo

from support import response_world as world
from support.response_contract import *  # noqa: F403

PATH = "trustrl.engines.miles"
MORE = {
    "qkv_format": "thd", "observe_training_entropy": True, "skip_actor_forward_only": False,
    "true_on_policy_mode": False, "use_dynamic_global_batch_size": False,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _groups():
    world.group()
    one = GroupInfo(rank=0, size=1, group=dist.group.WORLD)
    names = ("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp", "indep_dp")
    set_parallel_state(ParallelState(**dict.fromkeys(names, one)))


@pytest.fixture
def engine(monkeypatch):
    """miles' dispatcher of losses, the log-probs it computes, and its arguments."""

    def dispatch(args, batch, logits):
        rollouts = len(batch["advantages"])
        return dispatcher.loss_function(args, batch, 1, logits, apply_megatron_loss_scaling=True, num_rollouts=rollouts)

    return Engine(PATH, losses, dispatch, world.spy(monkeypatch, losses), MORE)  # noqa: F405

"""Regions in slime: its own `loss_function` calls ours, with real process groups of Megatron on one rank."""

import pytest

loss_module = pytest.importorskip(
    "slime.backends.megatron_utils.loss", reason="slime's checkout must be on the path; see `nox -s sources`"
)

from megatron.core import parallel_state

from support import response_world as world
from support.response_contract import *  # noqa: F403

PATH = "trustrl.engines.slime"


@pytest.fixture(scope="module", autouse=True)
def _groups():
    world.group()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


@pytest.fixture
def engine(monkeypatch):
    """slime's dispatcher of losses, the log-probs it computes, and its arguments."""

    def dispatch(args, batch, logits):
        return loss_module.loss_function(args, batch, 1, len(batch["advantages"]), logits)

    return Engine(PATH, loss_module, dispatch, world.spy(monkeypatch, loss_module))  # noqa: F405

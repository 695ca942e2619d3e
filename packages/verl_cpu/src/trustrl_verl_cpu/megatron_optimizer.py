"""Megatron's distributed optimizer around torch's AdamW, which it uses without transformer-engine, in checkpoints.

AdamW counts the steps of each parameter, from its first step on. Megatron asks for the count before it loads a
checkpoint, gives all parameters one and the same tensor, and then overwrites it with the count before loading. In
float32 it also copies into parameters that record gradients.
"""

import functools
from importlib import import_module
from typing import Any

import torch

from trustrl.engines.common import seam

_MARK = "trustrl_verl_cpu"


def install() -> None:
    """Makes a new optimizer able to load a checkpoint. Later calls have no effect.

    Raises:
        EngineError: If Megatron's optimizer has other methods than this function supports.
    """
    optimizer: Any = import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    state_dict, load_state_dict = optimizer.state_dict, optimizer.load_state_dict
    if hasattr(state_dict, _MARK):
        return
    seam.require_parameters(optimizer, "state_dict", ("self",), package="megatron-core")
    seam.require_parameters(optimizer, "load_state_dict", ("self", "state_dict"), package="megatron-core")

    @functools.wraps(state_dict)
    def started(self: Any) -> Any:
        if not self.optimizer.state:
            start(self.optimizer)
        return state_dict(self)

    @functools.wraps(load_state_dict)
    def separated(self: Any, loaded: Any) -> None:
        with torch.no_grad():  # in float32 the optimizer's parameters are views of the model's
            load_state_dict(self, loaded)
        (step,) = {group["step"] for group in loaded["optimizer"]["param_groups"]}
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(float(step))

    setattr(started, _MARK, True)
    optimizer.state_dict, optimizer.load_state_dict = started, separated


def start(optimizer: torch.optim.Optimizer) -> None:
    """Gives torch's AdamW the state that it has before its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}

"""Tasks whose rewards are computed in Python, small enough for a laptop and ready for a trainer.

    task = trustrl.world.tasks.load("arithmetic")
    GRPOTrainer(..., reward_funcs=task.reward, train_dataset=task.dataset("train"))

Frameworks are imported on first use.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

from trustrl.errors import ConfigError
from trustrl.registry import Registry
from trustrl.world.tasks.arithmetic import Arithmetic
from trustrl.world.tasks.own_data import OwnData
from trustrl.world.tasks.reasoning import ReasoningGym
from trustrl.world.tasks.task import SPLITS, Row, Task, refuse_unknown

__all__ = ["SPLITS", "TASKS", "Arithmetic", "OwnData", "ReasoningGym", "Row", "Task", "load"]

TASKS: Registry[Callable[..., Task]] = Registry("task")
"""Tasks by name. The text after a colon in a name is passed as the first argument."""

TASKS.register("arithmetic")(Arithmetic)
TASKS.register("data")(OwnData)
TASKS.register("reasoning-gym")(ReasoningGym)


def load(name: str, **settings: Any) -> Task:
    """Returns the task of this name, such as "arithmetic" or "reasoning-gym:chain_sum".

    Raises:
        UnknownNameError: If no task has this name.
        ConfigError: If the task has no such setting, or a value is invalid.
        MissingPackageError: If the task needs a package that is not installed.

    Example:
        >>> load("arithmetic", digits=3)
        Arithmetic(digits=3, held_out=0.1, seed=0)
    """
    family, colon, variant = name.partition(":")
    make = TASKS[family]
    parameters = signature(make).parameters.values()
    if colon and not any(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
        raise ConfigError(
            f"The task must be {family!r}, got {name!r}. It has no variants. Leave out {colon + variant!r}."
        )
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        refuse_unknown(family, settings, [p.name for p in parameters])
    return make(*([variant] if colon else []), **settings)

"""Environment and arguments of `main_ppo` on a CPU. The user's own settings replace the defaults."""

import os
from collections.abc import Collection, Sequence

from trustrl.runner.verl_cpu_settings import DEFAULTS, DYNAMIC, ENGINES, FSDP, PACKAGE, REPLAY

MEGATRON_PLUGIN = f"{PACKAGE}.megatron_plugin"

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    # Every rank is a process, and more threads than cores make small models ten times slower.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray starts an idle Python for every CPU that it is given. verl's environment cannot use them, and each one costs
    # seconds.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's own switch for a single machine: it listens only on the loopback address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment variables that verl, torch, and Ray read in every process."""

_MEGATRON = {
    # verl's group of settings for Megatron, for the actor, the reference and the critic.
    "model_engine": "megatron",
    **{f"{engine}.megatron.dtype": "float32" for engine in ENGINES},
    # verl's other bridge builds transformer-engine's layers only.
    **{f"{engine}.megatron.vanilla_mbridge": "True" for engine in ENGINES},
}
_CHOOSES_MEGATRON = {"model_engine": "megatron", "actor_rollout_ref.actor.strategy": "megatron"}

_MICRO_BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size", "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size", "critic.ppo_micro_batch_size",
)  # fmt: skip
UNLESS: dict[tuple[str, ...], Collection[str]] = {
    # verl passes these only to its own replay buffers.
    ("algorithm.filter_groups", "trainer.v1.sampler"): REPLAY.keys(),
    _MICRO_BATCHES: [DYNAMIC],
}
"""Defaults that contradict settings of the user: prefixes of such settings, and the defaults that they remove."""

ON_MEGATRON: dict[str, str] = _MEGATRON | {key: value for key, value in DEFAULTS.items() if key not in FSDP}
"""The defaults on Megatron."""


def chooses_megatron(arguments: Sequence[str]) -> bool:
    """Returns whether the user's arguments choose Megatron as the actor's engine."""
    chosen = {_key(argument): argument.partition("=")[2] for argument in arguments}
    return any(chosen.get(key) == value for key, value in _CHOOSES_MEGATRON.items())


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """Returns the user's arguments, preceded by the defaults of all settings that the user does not name.

    With RAY_ADDRESS, verl joins that cluster instead of starting one, unless it is "local", Ray's word for a new one.
    """
    joins = os.environ.get("RAY_ADDRESS", "local") != "local"
    named = {_key(argument) for argument in arguments}
    for beginnings, taken_back in UNLESS.items():
        if any(key.startswith(beginnings) for key in named):
            named |= set(taken_back)
    if joins:  # a running cluster has its own CPUs, and Ray refuses a number with an address
        named.add("ray_kwargs.ray_init")
    defaults = ON_MEGATRON if chooses_megatron(arguments) else DEFAULTS
    kept = [f"{name}={value}" for name, value in defaults.items() if not _named(_key(name), named)]
    if joins:
        variables = [name for name in ENVIRONMENT if not name.startswith("RAY_")]
        kept += [f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}='{ENVIRONMENT[name]}'" for name in variables]
    return [*kept, *arguments]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _named(key: str, named: set[str]) -> bool:
    """Returns whether the user names the key, or a whole group that holds it."""
    return any(key == name or key.startswith(f"{name}.") for name in named)

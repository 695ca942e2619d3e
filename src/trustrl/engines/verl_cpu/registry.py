"""The samplers' names in verl, as `actor_rollout_ref.rollout.name`. Their modules are loaded where they are used."""

from importlib import import_module
from typing import Any

from verl.workers.rollout import base, replica

from trustrl.errors import DuplicateNameError

SENDER = "trustrl.engines.verl_cpu.rollout.Sender"
REPLICAS = {"transformers_cpu": "TransformersReplica", "vllm_cpu": "VLLMReplica"}


def register() -> None:
    """Adds the names.

    Raises:
        DuplicateNameError: somebody else has one of them.
    """
    for name, replica_class in REPLICAS.items():
        taken = base._ROLLOUT_REGISTRY.get((name, "async"))
        if taken not in (None, SENDER):
            raise DuplicateNameError(f"verl's rollout {name!r} is already registered as {taken!r}.")
        # verl has a function to register replicas, and none for what sends them weights.
        base._ROLLOUT_REGISTRY[name, "async"] = SENDER
        replica.RolloutReplicaRegistry.register(name, _loader(replica_class))


def _loader(name: str) -> Any:
    return lambda: getattr(import_module("trustrl.engines.verl_cpu.rollout"), name)

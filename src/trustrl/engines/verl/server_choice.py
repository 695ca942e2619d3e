"""Makes verl's `rollout.name=vllm` start the server that records the sampler's top-K. Does not import vLLM."""

from typing import Any

from verl.workers.rollout import replica

NAME = "vllm"


def register_server() -> None:
    """Registers the recording replica under verl's own name. Calling it again has no effect.

    A replica that another plugin registered under this name stays. Regions on the sampled token work with it, and Top-K
    regions on the sampler raise if its answers lack the top-K.
    """
    registry = replica.RolloutReplicaRegistry
    if registry._registry.get(NAME) is replica._load_vllm:
        registry.register(NAME, load)


def load() -> Any:
    """Returns the replica's class. Imports vLLM."""
    from trustrl.engines.verl.vllm_server import RecordingReplica

    return RecordingReplica

"""Samplers whose second replica misses every weight sync from one step on, and still reports the new version.

Imported by every process of a run (`VERL_USE_EXTERNAL_MODULES`). `TRUSTRL_TEST_FROZEN` is the first step whose weights do
not arrive; without it, both replicas follow.
"""

import functools
import os
import sys

from ray import cloudpickle
from verl.workers.rollout import replica

from trustrl_verl_cpu import replicas
from trustrl_verl_cpu.transformers_server import TransformersServer
from trustrl_verl_cpu.vllm_server import VLLMServer

FROZEN = int(os.environ.get("TRUSTRL_TEST_FROZEN", 0))
SERVERS = {"transformers_cpu": TransformersServer, "vllm_cpu": VLLMServer}
REPLICAS = {"transformers_cpu": replicas.TransformersReplica, "vllm_cpu": replicas.VLLMReplica}

# vLLM's environment does not have this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def frozen(server, step):
    """Returns the class of a server that ignores the weights of this step and of later ones."""

    class Frozen(server):
        def ignores(self):
            return self._global_steps is not None and self._global_steps + 1 >= step

        def _begin_weights(self):
            return None if self.ignores() else super()._begin_weights()

        def _load_weights(self, bucket):
            return None if self.ignores() else super()._load_weights(bucket)

        def _end_weights(self):
            return None if self.ignores() else super()._end_weights()

    return Frozen


def with_one_frozen(kind, server):
    """Returns the replica's class whose second replica is frozen."""

    class OneFrozen(kind):
        @property
        def server_class(self):
            return frozen(server, FROZEN) if FROZEN and self.replica_rank == 1 else server

    return OneFrozen


for name, kind in REPLICAS.items():
    replica.RolloutReplicaRegistry.register(name, functools.partial(with_one_frozen, kind, SERVERS[name]))

"""The two ends of a sampler in verl: a replica that starts its server, and a sender on each trainer rank.

One server serves `rollout.tensor_model_parallel_size` trainer ranks. On a CPU, nothing is split over them.
"""

from abc import abstractmethod
from collections.abc import AsyncIterable, Iterable
from typing import Any

import ray
from torch import Tensor, distributed
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from trustrl.errors import ConfigError, EngineError
from trustrl_verl_cpu.sampler_server import BUCKET_BYTES, Limits, buckets
from trustrl_verl_cpu.transformers_server import TransformersServer
from trustrl_verl_cpu.vllm_server import VLLMServer, runtime_env


def server_name(replica_rank: int) -> str:
    """Returns the name of a replica's server in Ray."""
    return f"trustrl_cpu_server_{replica_rank}"


class WeightSender(BaseRollout):
    """The end of a trainer's rank, or of a separate sampler's worker. Sends weights to the server of its replica.

    Args:
        replica_rank: The replica of a separate sampler; None on a trainer's rank, whose own rank tells.
    """

    sleep_level = 2

    def __init__(self, *args: Any, replica_rank: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replica_rank = replica_rank

    async def resume(self, tags: list[str]) -> None:
        """Does nothing: the CPU's memory is not shared."""

    async def release(self) -> None:
        """Does nothing."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Sends every weight. All ranks iterate over the weights and gather them together; one rank per replica sends.

        Raises:
            EngineError: If verl sends differences instead of weights.
        """
        if wire_format != "named_tensors":
            raise EngineError(
                f"wire_format must be 'named_tensors', got {wire_format!r}. Set rollout.checkpoint_engine.backend to "
                "naive or ray_cpu."
            )
        if isinstance(weights, AsyncIterable):
            weights = [pair async for pair in weights]
        size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        size *= self.config.pipeline_model_parallel_size
        replica, place = divmod(distributed.get_rank() if distributed.is_initialized() else 0, size)
        replica = replica if self.replica_rank is None else self.replica_rank
        if place:
            for _name, _tensor in weights:
                pass
            return
        limit = min(BUCKET_BYTES, self.config.checkpoint_engine.update_weights_bucket_megabytes << 20)
        server: Any = ray.get_actor(server_name(replica))
        await server.begin_weights.remote()
        for bucket in buckets(weights, limit):
            await server.load_weights.remote(bucket)
        await server.end_weights.remote(global_steps)


class CPUReplica(RolloutReplica):
    """The driver's end. Starts one server, a Ray actor that does not use Ray's CPUs."""

    returns_routing = False
    """True if the server can return the experts that its routers chose."""

    @abstractmethod
    def started(self, limits: Limits, options: dict[str, Any]) -> Any:
        """Starts the server and returns the actor's handle."""

    async def launch_servers(self) -> None:
        """Starts the server and waits until its model is loaded.

        Raises:
            ConfigError: If the run wants the routing of a sampler that does not return it.
        """
        if self.config.enable_rollout_routing_replay and not self.returns_routing:
            raise ConfigError(
                "actor_rollout_ref.rollout.enable_rollout_routing_replay must be False with "
                "rollout.name=transformers_cpu, got True. This server returns no routing. Use rollout.name=vllm_cpu."
            )
        prompt, response = self.config.prompt_length, self.config.response_length
        limits = Limits(prompt, response, self.config.max_model_len or prompt + response)
        options = {
            "name": server_name(self.replica_rank), "num_cpus": 0, "max_concurrency": self.max_concurrency,
        }  # fmt: skip
        server = self.started(limits, options)
        await server.start.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = server_name(self.replica_rank)

    @property
    def path(self) -> str:
        """Returns the model's folder on this machine."""
        return self.model_config.get("local_path", None) or self.model_config.path

    @property
    def seed(self) -> int:
        """Returns the replica's seed. Each replica draws from a different random stream."""
        return self.config.seed + self.replica_rank


class TransformersReplica(CPUReplica):
    """`rollout.name=transformers_cpu`."""

    server_class = TransformersServer

    def started(self, limits: Limits, options: dict[str, Any]) -> Any:
        """Starts the server in verl's own environment."""
        return (
            ray.remote(self.server_class)
            .options(**options)
            .remote(
                self.path,
                limits,
                batch_size=self.config.max_num_seqs,
                dtype=self.config.dtype,
                load_weights=self.config.load_format != "dummy",
                ignore_eos=self.config.ignore_eos,
                seed=self.seed,
            )
        )


class VLLMReplica(CPUReplica):
    """`rollout.name=vllm_cpu`; `rollout.engine_kwargs.vllm_cpu` holds `python` and arguments for vLLM's `LLM`."""

    returns_routing = True
    server_class = VLLMServer

    def started(self, limits: Limits, options: dict[str, Any]) -> Any:
        """Starts the server in vLLM's environment.

        Raises:
            ConfigError: If the environment is not named, or lacks a package.
        """
        kwargs = dict(self.config.engine_kwargs.get("vllm_cpu", None) or {})
        environment = runtime_env(kwargs.pop("python", None))
        llm = {
            "dtype": self.config.dtype,
            "enable_prefix_caching": self.config.enable_prefix_caching,
            "enable_chunked_prefill": self.config.enable_chunked_prefill,
            "max_num_batched_tokens": self.config.max_num_batched_tokens,
            "load_format": self.config.load_format,
            "seed": self.seed,
            **kwargs,
        }
        return (
            ray.remote(self.server_class)
            .options(**options, runtime_env=environment)
            .remote(
                self.path,
                limits,
                batch_size=self.config.max_num_seqs,
                options=llm,
                routing=self.config.enable_rollout_routing_replay,
            )
        )

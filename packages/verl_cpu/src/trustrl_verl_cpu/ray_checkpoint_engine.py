"""Checkpoint engine that sends weights through Ray, for samplers that do not share the trainer's processes.

verl's own engines of this kind need a GPU or RDMA. `trainer.v1.trainer_mode=separate_async` uses this one with
`rollout.checkpoint_engine.backend=ray_cpu`.

Seam: `verl.checkpoint_engine.base.CheckpointEngineRegistry`, a public decorator, in the module that
      `rollout.checkpoint_engine.custom_backend_module` names
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any
from uuid import uuid4

import ray
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from trustrl.errors import EngineError
from trustrl_verl_cpu.sampler_server import BUCKET_BYTES, Bucket, buckets

BACKEND = "ray_cpu"


class Mailbox:
    """Ray actor that keeps each reader's unread buckets, in order. None is the end."""

    def __init__(self, num_readers: int) -> None:
        self._unread: list[asyncio.Queue[Bucket | None]] = [asyncio.Queue() for _ in range(num_readers)]

    async def put(self, bucket: Bucket | None) -> None:
        """Adds a bucket for every reader."""
        for unread in self._unread:
            await unread.put(bucket)

    async def get(self, reader: int) -> Bucket | None:
        """Waits for a reader's next bucket."""
        return await self._unread[reader].get()


@CheckpointEngineRegistry.register(BACKEND)
class RayCheckpointEngine(CheckpointEngine):
    """Sends all weights from the trainer's first rank to every worker of the samplers.

    Args:
        bucket_size: The largest size of a message in bytes.
        is_master: Whether this is the trainer's first rank.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._limit, self._is_master = min(BUCKET_BYTES, bucket_size), is_master
        self._mailbox: Any = None
        self._reader = -1

    def prepare(self) -> dict[str, Any]:
        """Returns nothing: Ray connects the processes."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Names the mailbox of this update, and numbers its readers. The trainer's ranks have the number −1."""
        name = f"trustrl_weights_{uuid4().hex}"

        def to(size: int, readers: list[int]) -> dict[str, list[Any]]:
            return {"name": [name] * size, "num_readers": [rollout_world_size] * size, "reader": readers}

        return to(actor_wg_world_size, [-1] * actor_wg_world_size), to(
            rollout_world_size, list(range(rollout_world_size))
        )

    def init_process_group(self, name: str, num_readers: int, reader: int) -> None:
        """Opens the mailbox, on the trainer's first rank. Readers find it by its name when they read."""
        self._name, self._reader = name, reader
        if self._is_master and reader < 0:
            options = {"name": name, "num_cpus": 0}
            self._mailbox = ray.remote(Mailbox).options(**options).remote(num_readers)
            ray.get(self._mailbox.__ray_ready__.remote())

    def finalize(self) -> None:
        """Closes the mailbox."""
        if self._mailbox is not None:
            ray.kill(self._mailbox)
        self._mailbox = None

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """Sends every weight. All ranks iterate over the weights, which they gather together; the first one sends."""
        for bucket in buckets(weights, self._limit):
            if self._mailbox is not None:
                await self._mailbox.put.remote(bucket)
        if self._mailbox is not None:
            await self._mailbox.put.remote(None)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Yields every weight.

        Raises:
            EngineError: On a rank of the trainer.
        """
        if self._reader < 0:
            raise EngineError("Weights must be received by a sampler's worker, got a rank of the trainer.")
        mailbox = ray.get_actor(self._name)
        while (bucket := await mailbox.get.remote(self._reader)) is not None:
            for name, tensor in bucket.tensors():
                yield name, tensor

"""Weights over gloo, for a sampler in another process: a backend of vLLM's weight-transfer API that needs no GPU.

Importing this module registers it under `BACKEND`. A sampler's workers import it through `worker_extension_cls`:

    LLM(..., weight_transfer_config=WeightTransferConfig(backend=BACKEND), worker_extension_cls=EXTENSION)

and a server with VLLM_SERVER_DEV_MODE=1 in its environment and

    --weight-transfer-config '{"backend": "trustrl-gloo"}'
    --worker-extension-cls trustrl.engines.vllm.gloo_transfer.WorkerExtension

The trainer connects once, and sends after every update:

    sender = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo(rank=0), client=ServerClient("http://127.0.0.1:8000"), source=ModuleSource(model))
    sender.send_weights()

Seam: `WeightTransferEngineFactory` and `WeightTransferTrainerFactory`, vLLM's documented registries. vLLM calls the
phases init, start, update and finish; it does not empty the prefix cache, so `send_weights` asks for that at the end.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from trustrl.config.checks import real, whole
from trustrl.engines.vllm.channel import Channel, Listener
from trustrl.engines.vllm.clients import SamplerClient
from trustrl.engines.vllm.reload import begin_reload, end_reload
from trustrl.errors import ConfigError, DuplicateNameError, EngineError

BACKEND = "trustrl-gloo"
EXTENSION = f"{__name__}.WorkerExtension"


class WorkerExtension:
    """Named in `worker_extension_cls`, it makes a worker process import this module, and adds nothing."""


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where a worker finds the trainer."""

    address: str
    port: int
    world_size: int
    timeout_seconds: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What is about to be sent, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """The trainer's side. `rank` is the rank among trainers: 0 sends, the others only take part in gathering."""

    backend: ClassVar[str] = BACKEND

    num_workers: int = 1
    """Workers of the sampler: its tensor × pipeline × data parallel sizes."""

    address: str = "127.0.0.1"
    """Of rank 0's machine, as the sampler reaches it. Another than loopback is open to that network."""

    port: int = 0
    """0 takes a free one."""

    timeout_seconds: float = 60.0
    """How long either side waits for the other."""

    def __post_init__(self) -> None:
        whole("num_workers", self.num_workers, low=1)
        whole("port", self.port, low=0)
        real("timeout_seconds", self.timeout_seconds, rule="a number of seconds > 0", low=0.0, high=1e6)


class GlooReceiver(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """A worker's side."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _channel: Channel | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Joins the trainer."""
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._channel = Channel.join(
            init_info.address, init_info.port, rank=worker + 1, world_size=init_info.world_size,
            timeout_seconds=init_info.timeout_seconds,
        )  # fmt: skip

    def start_weight_update(self) -> None:
        """Prepares the layers."""
        begin_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives and loads; vLLM's own version waits for an accelerator even where there is none."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            end_reload(self.model, self.model_config)  # half old, half new, but a model again
            raise
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Loads each tensor as it arrives."""
        if self._channel is None:
            raise EngineError("A weight update must follow init_weight_transfer_engine, and it was not called.")
        described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        for name, dtype, shape in described:
            self.model.load_weights([(name, self._channel.receive(shape, getattr(torch, dtype)))])  # pyright: ignore[reportCallIssue]

    def finish_weight_update(self) -> None:
        """Packs the layers, tied heads too."""
        end_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leaves the trainer."""
        self._channel = None


class GlooSender(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The trainer's side. Made by `trainer_init`, on every trainer rank."""

    init_info_cls = GlooTrainerInitInfo
    client: SamplerClient
    source: WeightSource
    _channel: Channel | None = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Connects to the sampler.

        Raises:
            ConfigError: no weights to send, or a client that cannot empty the prefix cache.
            EngineError: the sampler did not come.
        """
        if source is None:
            raise ConfigError("source must be a WeightSource, got None. Pass vLLM's ModuleSource(model).")
        if not isinstance(client, SamplerClient):
            raise ConfigError(
                f"client must have the methods of SamplerClient, reset_prefix_cache among them, got {client!r}. "
                "Use LocalClient or ServerClient of trustrl.engines.vllm.clients: prefixes computed with old weights "
                "would be used again."
            )
        sender = cls(client=client, source=source, is_sender=init_info.is_sender)
        if sender.is_sender:
            listener = Listener(
                init_info.address, init_info.port, num_receivers=init_info.num_workers,
                timeout_seconds=init_info.timeout_seconds,
            )  # fmt: skip
            info = GlooInitInfo(listener.address, listener.port, listener.world_size, init_info.timeout_seconds)
            with _calling(client.init_weight_transfer_engine, asdict(info)) as call:
                sender._channel = listener.accept(while_waiting=lambda: _raise_if_failed(call))
        return sender

    def send_weights(self, weight_version: str | None = None) -> None:
        """Runs one update, on every trainer rank; returns when the sampler has the new weights and no old prefixes.

        Args:
            weight_version: what vLLM shall call these weights in its outputs.
        """
        described = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:  # gathering a sharded parameter takes every rank
                pass
            return
        if self._channel is None:
            raise EngineError("Weights must be sent over an open connection, and this one is shut down. Make another.")
        info = GlooUpdateInfo(
            names=[m.name for m in described],
            dtype_names=[str(m.dtype).removeprefix("torch.") for m in described],
            shapes=[list(m.shape) for m in described],
        )
        self.client.start_weight_update()
        with _calling(self.client.update_weights, asdict(info)) as call:
            for (name, tensor), m in zip(self.source, described, strict=True):
                if (name, tensor.dtype, tuple(tensor.shape)) != (m.name, m.dtype, m.shape):
                    raise EngineError(
                        f"The source must yield {m.name} {m.dtype} {m.shape}, as its metadata says, "
                        f"got {name} {tensor.dtype} {tuple(tensor.shape)}. The sampler would load garbage."
                    )
                _raise_if_failed(call)  # before waiting for a sampler that has given up
                self._channel.send(tensor)
        self.client.finish_weight_update(weight_version)
        self.client.reset_prefix_cache()

    def shutdown(self) -> None:
        """Closes the connection."""
        self._channel = None


@contextmanager
def _calling(method: Callable[[Any], None], argument: Any) -> Iterator[Future]:
    """Runs a call to the sampler beside the block that serves it; its error, if any, is the one to see."""
    pool = ThreadPoolExecutor(max_workers=1)
    call = pool.submit(method, argument)
    try:
        yield call
        call.result()
    except EngineError:
        _raise_if_failed(call)
        raise
    finally:
        pool.shutdown(wait=False)  # after an error the call may hang until its own timeout


def _raise_if_failed(call: Future) -> None:
    if call.done():
        call.result()


def _register() -> None:
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooReceiver)
        WeightTransferTrainerFactory.register_engine(BACKEND, GlooSender)
    except ValueError as error:
        raise DuplicateNameError(
            f"The weight-transfer backend {BACKEND!r} must be trustrl's own, and somebody else has registered it. "
            "Remove the other plugin."
        ) from error


_register()

"""Backend of vLLM's weight-transfer API over gloo, for a sampler in another process. It does not need a GPU.

Importing this module registers the backend as `BACKEND`. A sampler's workers import it through `worker_extension_cls`:

    LLM(..., weight_transfer_config=WeightTransferConfig(backend=BACKEND), worker_extension_cls=EXTENSION)

A server needs VLLM_SERVER_DEV_MODE=1 in its environment, and these arguments:

    --weight-transfer-config '{"backend": "trustrl-gloo"}'
    --worker-extension-cls trustrl.engines.vllm.gloo_transfer.WorkerExtension

The trainer connects once, and sends the weights after every update:

    sender = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo(rank=0), client=ServerClient("http://127.0.0.1:8000"), source=ModuleSource(model))
    sender.send_weights()

Seam: `WeightTransferEngineFactory` and `WeightTransferTrainerFactory`, vLLM's documented registries. vLLM calls the
phases init, start, update, and finish. It does not empty the prefix cache, so `send_weights` requests that at the end.
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

from trustrl.config.validators import real, whole
from trustrl.engines.vllm.clients import SamplerClient
from trustrl.engines.vllm.gloo_channel import Channel, Listener, require_loopback
from trustrl.engines.vllm.weight_reload import begin_reload, end_reload
from trustrl.errors import ConfigError, DuplicateNameError, EngineError

BACKEND = "trustrl-gloo"
EXTENSION = f"{__name__}.WorkerExtension"


class WorkerExtension:
    """Empty class. Naming it in `worker_extension_cls` makes a worker process import this module."""


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """The address at which a worker finds the trainer."""

    address: str
    port: int
    world_size: int
    timeout_seconds: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of an update, in the order in which they are sent."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """Settings of the trainer's side. `rank` is the rank among trainers: 0 sends, the others only help to gather."""

    backend: ClassVar[str] = BACKEND

    num_workers: int = 1
    """The number of the sampler's workers: its tensor × pipeline × data parallel sizes."""

    address: str = "127.0.0.1"
    """The address of rank 0's machine, as the sampler reaches it. Any address but loopback needs
    TRUSTRL_WEIGHTS_OVER_NETWORK=1 in the environments of trainer and sampler; the channel authenticates nobody."""

    port: int = 0
    """The port; 0 chooses a free one."""

    timeout_seconds: float = 60.0
    """The time that either side waits for the other."""

    def __post_init__(self) -> None:
        require_loopback(self.address)
        whole("num_workers", self.num_workers, low=1)
        whole("port", self.port, low=0)
        real("timeout_seconds", self.timeout_seconds, rule="a number of seconds > 0", low=0.0, high=1e6)


class GlooReceiver(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """The worker's side of the transfer."""

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
        """Receives and loads the weights. vLLM's own version waits for an accelerator even if none exists."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            end_reload(self.model, self.model_config)  # weights are half old and half new, but the model is usable
            raise
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Loads each tensor as it arrives."""
        if self._channel is None:
            raise EngineError("A weight update came before init_weight_transfer_engine. Call that first.")
        described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        for name, dtype, shape in described:
            self.model.load_weights([(name, self._channel.receive(shape, getattr(torch, dtype)))])  # pyright: ignore[reportCallIssue]

    def finish_weight_update(self) -> None:
        """Packs the layers, including tied heads."""
        end_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Disconnects from the trainer."""
        self._channel = None


class GlooSender(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The trainer's side of the transfer. `trainer_init` creates it on every trainer rank."""

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
            ConfigError: If `source` is None, or if the client cannot empty the prefix cache.
            EngineError: If the sampler does not join.
        """
        if source is None:
            raise ConfigError("source must be a WeightSource, got None. Pass vLLM's ModuleSource(model).")
        if not isinstance(client, SamplerClient):
            raise ConfigError(
                f"client must have the methods of SamplerClient, including reset_prefix_cache, got {client!r}. Without "
                "the reset, vLLM would reuse prefixes computed with old weights. Use LocalClient or ServerClient from "
                "trustrl.engines.vllm.clients."
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
        """Runs one update. Call it on every trainer rank.

        It returns when the sampler has the new weights and an empty prefix cache.

        Args:
            weight_version: vLLM's name for these weights in its outputs.

        Raises:
            EngineError: If the connection is closed, or the source does not match its metadata.
        """
        described = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:  # gathering a sharded parameter needs every rank
                pass
            return
        if self._channel is None:
            raise EngineError(
                "Weights must be sent over an open connection, and this one is shut down. Create another one."
            )
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
                        f"The source must yield {m.name} {m.dtype} {m.shape}, as in its metadata, "
                        f"got {name} {tensor.dtype} {tuple(tensor.shape)}. The sampler would load wrong weights."
                    )
                _raise_if_failed(call)  # otherwise this waits for a sampler that has failed
                self._channel.send(tensor)
        self.client.finish_weight_update(weight_version)
        # vLLM keeps prefixes that were computed with the weights before.
        self.client.reset_prefix_cache()

    def shutdown(self) -> None:
        """Closes the connection."""
        self._channel = None


@contextmanager
def _calling(method: Callable[[Any], None], argument: Any) -> Iterator[Future]:
    """Runs a call to the sampler in a thread while the block serves it. An error of the call takes precedence."""
    pool = ThreadPoolExecutor(max_workers=1)
    call = pool.submit(method, argument)
    try:
        yield call
        call.result()
    except EngineError:
        _raise_if_failed(call)
        raise
    finally:
        pool.shutdown(wait=False)  # after an error, the call may hang until its timeout


def _raise_if_failed(call: Future) -> None:
    if call.done():
        call.result()


def _register() -> None:
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooReceiver)
        WeightTransferTrainerFactory.register_engine(BACKEND, GlooSender)
    except ValueError as error:
        raise DuplicateNameError(
            f"The weight-transfer backend {BACKEND!r} must be trustrl's, and another plugin has registered it. "
            "Remove the other plugin."
        ) from error


_register()

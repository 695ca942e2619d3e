"""Plugin that makes verl run on a CPU: a platform, process groups on one machine, and the names of the samplers.

verl imports it in every process, before any other module:
`VERL_USE_EXTERNAL_MODULES=trustrl_verl_cpu.plugin,...`. `VERL_PLATFORM=cpu` chooses the platform.

Seams:  `verl.plugin.platform.PlatformRegistry`, a public decorator; verl's registries of rollouts and replicas;
        `torch.distributed.init_process_group`, wrapped; two names in verl's FSDP engine
Engine: verl registers its FSDP engine for cuda and npu, and it runs on a CPU unchanged. verl's own variable
        `VERL_ENGINE_DEVICE` makes verl use that engine, for policies and for critics
"""

import contextlib
import functools
import os
import socket
import sys
import types
from importlib import import_module
from typing import Any

import torch
from torch import distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.workers.rollout import base, replica

from trustrl.engines.common import seam
from trustrl.errors import DuplicateNameError, EngineError

PLATFORM = "cpu"

SENDER = "trustrl_verl_cpu.replicas.WeightSender"
REPLICAS = {"transformers_cpu": "TransformersReplica", "vllm_cpu": "VLLMReplica"}
"""Maps the samplers' names, `actor_rollout_ref.rollout.name`, to their classes in `replicas`."""

TWO_BACKENDS = "cpu:gloo,cpu:gloo"
"""The backends that verl requests, one for the CPU and one for its device. torch refuses two for the same device."""

VALUE_HEAD_PARAMETERS = ("local_path", "torch_dtype", "model_config", "trust_remote_code")
POLL_SECONDS = 0.05

_MARK = "trustrl_verl_cpu"


class Device(types.ModuleType):
    """Device module: `torch.cpu`, with functions that do nothing for the parts that only accelerators have."""

    get_rng_state, set_rng_state = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    is_available = staticmethod(lambda: False)
    mem_get_info = staticmethod(lambda *_: (1, 1))
    get_device_name = staticmethod(lambda *_: "CPU")
    current_device = staticmethod(lambda: torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: 0)


def _always(value: Any) -> Any:
    """Returns a method that ignores its arguments and returns `value`."""
    return lambda *_, **__: value


class CPU(PlatformBase):
    """verl platform whose ranks are processes and whose network is gloo. It does not manage memory."""

    device_name = vendor_name = PLATFORM  # pyright: ignore[reportAssignmentType]
    device_module = Device(PLATFORM)  # pyright: ignore[reportAssignmentType]
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _always(None)
    cudart = _always(None)
    manual_seed = manual_seed_all = lambda _, seed: torch.manual_seed(seed)

    is_available = _always(True)
    # False for verl's own search, which would otherwise prefer it to a GPU that this process cannot see.
    is_platform_available = _always(False)
    is_ipc_supported = _always(False)
    current_device = _always(torch.device("cpu"))
    device_count = _always(1)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    nvtx_range = _always(contextlib.nullcontext())

    # One "GPU" in Ray stands for one rank: before it starts workers, verl counts GPUs and no other resource.
    ray_resource_name = _always("GPU")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    ray_noset_envvars = _always([])


def register_platform() -> None:
    """Registers the platform. Calling it again has no effect."""
    PlatformRegistry.register(platform=PLATFORM)(CPU)
    if os.environ.get("VERL_PLATFORM") == PLATFORM:
        os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")


def register_samplers() -> None:
    """Adds the samplers' names to verl. Their modules are loaded when they are used.

    Raises:
        DuplicateNameError: If another package has registered one of the names.
    """
    for name, replica_class in REPLICAS.items():
        taken = base._ROLLOUT_REGISTRY.get((name, "async"))
        if taken not in (None, SENDER):
            raise DuplicateNameError(
                f"verl's rollout {name!r} is already registered as {taken!r}. Remove the other plugin."
            )
        # verl has a function that registers replicas, and none that registers the senders of their weights.
        base._ROLLOUT_REGISTRY[name, "async"] = SENDER
        replica.RolloutReplicaRegistry.register(name, _loader(replica_class))


def _loader(name: str) -> Any:
    return lambda: getattr(import_module("trustrl_verl_cpu.replicas"), name)


def install_process_group() -> None:
    """Wraps `torch.distributed.init_process_group` so that it accepts verl's backends. Other calls are unchanged."""
    if not hasattr(distributed.init_process_group, _MARK):
        distributed.init_process_group = _with_one_backend(distributed.init_process_group)


def _with_one_backend(start: Any) -> Any:
    @functools.wraps(start)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if backend != TWO_BACKENDS:
            return start(backend, *args, **kwargs)
        if not args and kwargs.get("init_method") is None and kwargs.get("store") is None:
            kwargs |= _loopback_store(kwargs.get("rank", -1), kwargs.get("world_size", -1))
        return start("gloo", *args, **kwargs)

    setattr(init_process_group, _MARK, True)
    return init_process_group


def _loopback_store(rank: int, world_size: int) -> dict[str, Any]:
    """Returns a store on the loopback address, or nothing if another process keeps the store.

    torch's own store would listen on every interface, and gloo on the address of the machine's name.
    """
    address, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT", 0))
    if address == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if address != "127.0.0.1" or rank < 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}
    listening: dict[str, Any] = {}
    if rank == 0:
        listening["master_listen_fd"] = socket.create_server((address, port)).detach()
    store_class: Any = distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    store = store_class(address, port, world_size, is_master=rank == 0, **listening)
    return {"store": store}


def install_engine() -> None:
    """Replaces two parts of verl's FSDP engine that only work on a GPU, in this process.

    verl always loads a critic with flash-attention, and always offloads a reference model to pinned memory.

    Raises:
        EngineError: If verl does not have these names, or calls them in a different way.
    """
    # verl's engines read the platform when they are imported.
    model, transformer_impl = map(import_module, ("verl.utils.model", "verl.workers.engine.fsdp.transformer_impl"))
    seam.require_parameters(model, "load_valuehead_model", VALUE_HEAD_PARAMETERS)
    if not hasattr(transformer_impl, "CPUOffloadPolicy"):
        raise EngineError(
            f"{transformer_impl.__name__} has no name CPUOffloadPolicy. Install a verl version "
            "listed in trustrl's documentation."
        )
    model.load_valuehead_model = load_valuehead_model  # pyright: ignore[reportAttributeAccessIssue]
    transformer_impl.CPUOffloadPolicy = no_offload  # pyright: ignore[reportAttributeAccessIssue]


def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """Loads a critic as verl's function of this name does, with an attention that runs on a CPU."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code,
        attn_implementation="eager",
    )  # fmt: skip


def no_offload(pin_memory: bool = True) -> None:
    """Replaces `CPUOffloadPolicy`: the weights are already in the CPU's memory."""


def quick_replay_buffer(**kwargs: Any) -> Any:
    """Returns verl's replay buffer with a shorter polling interval.

    verl polls every 2 s, which dominates the step time of tiny models. verl calls this function as
    `trainer.v1.sampler.custom_sampler`; the buffer's choice of samples is verl's own.
    """
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

    buffer = ReplayBuffer if kwargs["trainer_mode"] == "sync" else ReplayBufferAsync
    return buffer(**{"poll_interval": POLL_SECONDS, **kwargs})


register_platform()
register_samplers()
if os.environ.get("VERL_PLATFORM") == PLATFORM:
    install_process_group()
    install_engine()

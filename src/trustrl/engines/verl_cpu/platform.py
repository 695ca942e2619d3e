"""A CPU as one of verl's platforms, chosen by `VERL_PLATFORM=cpu`.

Seam:   `verl.plugin.platform.PlatformRegistry`, a public decorator
Engine: verl's FSDP engine is registered for cuda and npu and runs on a CPU as it is; verl's own variable
        `VERL_ENGINE_DEVICE` makes it look there, for policies and for critics
"""

import contextlib
import os
import types
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

NAME = "cpu"


class Device(types.ModuleType):
    """`torch.cpu`, and nothing at all for what only accelerators have."""

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
    """A method that returns `value`, whatever it is asked."""
    return lambda *_, **__: value


class CPU(PlatformBase):
    """Ranks are processes, the network is gloo, and memory is nobody's business."""

    device_name = vendor_name = NAME  # pyright: ignore[reportAssignmentType]
    device_module = Device(NAME)  # pyright: ignore[reportAssignmentType]
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _always(None)
    cudart = _always(None)
    manual_seed = manual_seed_all = lambda _, seed: torch.manual_seed(seed)

    is_available = _always(True)
    # Never found by verl's own search, which would prefer it to a GPU that this process cannot see.
    is_platform_available = _always(False)
    is_ipc_supported = _always(False)
    current_device = _always(torch.device("cpu"))
    device_count = _always(1)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    nvtx_range = _always(contextlib.nullcontext())

    # One "GPU" of Ray's stands for one rank: verl counts GPUs, and no other resource, before it starts workers.
    ray_resource_name = _always("GPU")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    ray_noset_envvars = _always([])


def register() -> None:
    """Makes the platform known. Twice is as good as once."""
    PlatformRegistry.register(platform=NAME)(CPU)
    if os.environ.get("VERL_PLATFORM") == NAME:
        os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")

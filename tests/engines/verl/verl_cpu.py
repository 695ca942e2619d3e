"""verl without a GPU, for tests: a platform and an engine of its own, added through verl's registries."""

import contextlib
import types
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class Device(types.ModuleType):
    """`torch.cpu`, and nothing for what only accelerators have."""

    get_rng_state, set_rng_state = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    is_available = staticmethod(lambda: False)
    mem_get_info = staticmethod(lambda: (1, 1))
    get_device_name = staticmethod(lambda *_: "CPU")
    current_device = staticmethod(lambda: torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: 0)


def nothing(*_: Any, **__: Any) -> None:
    pass


@PlatformRegistry.register(platform="cpu")
class CPU(PlatformBase):
    """Chosen by VERL_PLATFORM=cpu."""

    device_name = vendor_name = "cpu"
    device_module = Device("cpu")
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = nothing

    def is_available(self):
        return True

    def is_ipc_supported(self):
        return False

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []


# verl's engines ask for the platform when they are imported.
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")(FSDPEngineWithLMHead)

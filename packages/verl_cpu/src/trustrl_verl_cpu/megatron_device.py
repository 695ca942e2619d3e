"""CUDA calls of Megatron-Core and mbridge, answered by the CPU.

Megatron has no CPU platform: it creates tensors on "cuda", orders them with streams, and keeps random states of a GPU.
`install` replaces these names in torch, in this process. It must not run where a GPU is in use.
"""

import contextlib
import functools
import types
from importlib import import_module
from typing import Any

import torch
from torch.utils import _device

from trustrl.engines.common import seam

CPU = torch.device("cpu")

FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")
"""Functions of torch that Megatron calls with `device="cuda"`."""

TENSOR_KINDS = ("BFloat16", "Byte", "Double", "Float", "Half", "Int", "Long")
"""Prefixes of the old tensor types, such as `torch.cuda.FloatTensor`."""

PROPERTIES = types.SimpleNamespace(major=8, minor=0, total_memory=1, name="CPU")

_MARK = "trustrl_verl_cpu"


class Stream:
    """Stream or event: every method does nothing and returns it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


def install() -> None:
    """Makes `torch.cuda`, `device="cuda"` and Megatron's random states use the CPU. Later calls have no effect.

    Raises:
        EngineError: If Megatron keeps its random states in another way than this function supports.
    """
    if hasattr(torch.Tensor.cuda, _MARK):
        return
    random = import_module("megatron.core.tensor_parallel.random")
    seam.require_parameters(random, "_get_cuda_rng_state", ("device", "clone", "graph_safe"), package="megatron-core")
    seam.require_parameters(
        random, "_set_cuda_rng_state", ("new_state", "device", "graph_safe"), package="megatron-core"
    )
    for owner, names in _replacements(random):
        for name, value in names.items():
            setattr(owner, name, value)
    # torch lists the functions that `with torch.device(...)` affects once, and must list its own.
    _device._device_constructors()
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.to = on_cpu(torch.Tensor.to)
    torch.Tensor.type = _as_on_a_gpu(torch.Tensor.type)
    setattr(torch.Tensor.cuda, _MARK, True)


def on_cpu(function: Any) -> Any:
    """Returns the function with "cuda" replaced by the CPU in its arguments, and without pinned memory."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return function(*(CPU if is_cuda(arg) else arg for arg in args), **kwargs)

    return call


def is_cuda(value: Any) -> bool:
    """Returns whether the value names a CUDA device."""
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


def _as_on_a_gpu(type_of: Any) -> Any:
    """Returns `Tensor.type` with the names of CUDA's types, which Megatron's optimizers compare; accepts them too."""

    @functools.wraps(type_of)
    def named(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return type_of(self).replace("torch.", "torch.cuda.", 1)
        return type_of(self, dtype.replace(".cuda.", ".") if isinstance(dtype, str) else dtype, *args, **kwargs)

    return named


def _replacements(random: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Returns owners of names, with the new values of the names."""
    nothing, zero, stream = _always(None), _always(0), _always(Stream())
    get_state = lambda *_, **__: torch.get_rng_state()  # noqa: E731
    set_state = lambda state, *_, **__: torch.set_rng_state(state)  # noqa: E731
    seed = torch.default_generator.manual_seed
    states = {"get_rng_state": get_state, "set_rng_state": set_state}
    cuda = {
        "current_device": _always(CPU),
        "get_device_capability": _always((PROPERTIES.major, PROPERTIES.minor)),
        "get_device_properties": _always(PROPERTIES),
        "Event": Stream,
        "Stream": Stream,
        "current_stream": stream,
        "default_stream": stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "manual_seed": seed,
        "manual_seed_all": seed,
        **dict.fromkeys(("empty_cache", "set_device", "synchronize"), nothing),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), zero),
        **{f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in TENSOR_KINDS},
        **states,
    }
    return [
        (torch.cuda, cuda),
        (torch.cuda.random, states),
        (random, {"_get_cuda_rng_state": get_state, "_set_cuda_rng_state": set_state}),
        (torch.Tensor, {"cuda": _unmoved}),
        (torch.nn.Module, {"cuda": lambda self, *_, **__: self}),
    ]


def _unmoved(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return self


def _always(value: Any) -> Any:
    """Returns a function that ignores its arguments and returns `value`."""
    return lambda *_, **__: value

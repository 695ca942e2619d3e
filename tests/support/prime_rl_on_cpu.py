"""On a CPU: prime-rl's trainer, with stubs for the packages that it does not need there.

Its step is its own code: model, FSDP2, data, loss, optimizer, and the weights that it hands to its sampler. Changed are the
device, the attention kernel, and, for comparisons, the precision of products, which prime-rl fixes to bf16.
"""

import importlib.abc
import importlib.machinery
import sys
import types

STUBS = {
    "dion", "fla", "grpc", "modelexpress", "openai", "orjson", "prime_cli", "prometheus_client", "pynvml", "renderers",
    "ring_flash_attn", "setproctitle", "tenacity", "tilelang", "torchao", "torchdata", "torchtitan", "triton",
    "verifiers", "vllm", "wandb_gql", "wandb_workspaces",
}  # fmt: skip
"""Packages that prime-rl's trainer imports, and calls for other models, optimizers, transports and monitors only."""


class _AnyName(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Stub(metaclass=_AnyName):
    """A name of a package that is not here: a base class, a decorator, a default. It computes nothing."""

    def __new__(cls, *args, **kwargs):
        decorated = args[0] if len(args) == 1 and callable(args[0]) else None
        return decorated or super().__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else self


class _Module(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Stub,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def install():
    """Call it before prime-rl's trainer is imported. A package that is installed is not replaced."""
    import transformers.modeling_utils  # noqa: F401  it asks for packages, and keeps the answer

    sys.meta_path.append(_Finder())


def trainer(precision):
    """Returns prime-rl's module of training, which then runs on the CPU and multiplies in this precision.

    Args:
        precision: A torch dtype. None for prime-rl's own, bf16.
    """
    install()
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func, kinds, args=(), kwargs=None):
            if func is torch.Tensor.cuda:
                return args[0]
            moved = {name: "cpu" if isinstance(x, str) and x == "cuda" else x for name, x in (kwargs or {}).items()}
            return func(*("cpu" if isinstance(x, str) and x == "cuda" else x for x in args), **moved)

    for name in ("set_device", "reset_peak_memory_stats", "empty_cache"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.max_memory_reserved = lambda: 0
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda **kwargs: start("gloo", timeout=kwargs["timeout"])

    from prime_rl.trainer import model, parallel_dims, perf, utils
    from prime_rl.trainer.rl import train

    parallel_dims.device_type = "cpu"
    perf.PerfCounter.get_step_mfu = lambda *args: 0.0  # divides by a GPU's speed
    utils.torch_clip_grad_norm_ = _clip  # torchtitan's
    if precision is not None:
        policy = model.MixedPrecisionPolicy
        model.MixedPrecisionPolicy = lambda **kwargs: policy(**kwargs | {"param_dtype": precision})
    OnCpu().__enter__()
    return train


def _clip(parameters, max_norm, ep_enabled):
    from torch.nn.utils import clip_grad_norm_

    assert not ep_enabled
    return clip_grad_norm_(list(parameters), max_norm).full_tensor()

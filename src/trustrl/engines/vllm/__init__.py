"""vLLM as the sampler: settings that TRL has no field for, a verified weight sync, and μ's top-K by re-scoring.

The parts that only a CPU needs have no effect on a GPU. Nothing here replaces code for a whole process. Import
`trustrl.engines.vllm.gloo_transfer` separately: it subclasses vLLM's classes, and the other modules import vLLM only
when they are called.
"""

from trustrl.engines.vllm.options import (
    cpu_options as cpu_options,
    extra_llm_options as extra_llm_options,
    missing_cpu_environment as missing_cpu_environment,
    set_cpu_environment as set_cpu_environment,
)
from trustrl.engines.vllm.scoring import (
    Scores as Scores,
    score as score,
    score_on_server as score_on_server,
    score_rollout as score_rollout,
    tempered as tempered,
)
from trustrl.engines.vllm.weight_sync import SyncReport as SyncReport, install_sync as install_sync

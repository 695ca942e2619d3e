"""vLLM as the sampler: settings TRL has no field for, weight sync that really syncs, and μ's top-K by re-scoring.

What a CPU needs and a GPU does not is inert on a GPU; nothing here is replaced for a whole process.
`trustrl.engines.vllm.gloo_transfer` is imported on its own: it subclasses vLLM's classes, the rest waits for the call.
"""

from trustrl.engines.vllm.options import (
    cpu_options as cpu_options,
    extra_llm_options as extra_llm_options,
    missing_cpu_environment as missing_cpu_environment,
    set_cpu_environment as set_cpu_environment,
)
from trustrl.engines.vllm.rollout import score_rollout as score_rollout
from trustrl.engines.vllm.scoring import (
    Scores as Scores,
    score as score,
    score_on_server as score_on_server,
    tempered as tempered,
)
from trustrl.engines.vllm.sync import SyncReport as SyncReport, install_sync as install_sync

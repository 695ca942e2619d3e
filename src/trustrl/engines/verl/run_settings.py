"""Settings of a verl run that its records describe.

Seam: `ActorRolloutRefWorker.init_model`, which is called unchanged. The actor inside it does not see the sampler's
      settings, so a context variable carries them.
"""

import functools
from contextvars import ContextVar
from typing import Any

from trustrl.engines.common import seam
from trustrl.engines.refusals.rows import reader

_CONFIG: ContextVar[Any] = ContextVar("actor_rollout_ref", default=None)


def knowing_the_config(init_model: Any) -> Any:
    """Returns verl's `init_model` that passes its worker's settings on to `about`."""

    @functools.wraps(init_model)  # keeps verl's mark of how to call it on a group of workers
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _CONFIG.set(self.config)
        try:
            return init_model(self, *args, **kwargs)
        finally:
            _CONFIG.reset(before)

    return inner


def about(worker: Any, loss: str) -> dict[str, Any]:
    """Returns the settings of a verl run that readers of its records want. None if this worker does not know one.

    Args:
        worker: verl's `TrainingWorker`.
        loss: The name of its policy loss.
    """
    given = reader(_CONFIG.get() or {})
    engine, optimizer = worker.engine_config, worker.optimizer_config
    return {
        "engine": "verl",
        "engine_version": ".".join(map(str, seam.version_of("verl"))),
        "strategy": engine.strategy,
        "model": getattr(worker.model_config, "path", None),
        "sampler": given("rollout.name"),
        "loss": loss,
        "completions_per_prompt": given("rollout.n"),
        "learning_rate": getattr(optimizer, "lr", None),
        "trainer_dtype": getattr(engine, "dtype", None),
        "sampler_dtype": given("rollout.dtype"),
        "temperature": given("rollout.temperature"),
        "top_p": given("rollout.top_p"),
        "top_k": given("rollout.top_k"),
        "seed": given("rollout.seed"),
    }

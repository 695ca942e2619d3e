"""Settings of a verl run that its records describe.

Seam: `ActorRolloutRefWorker.init_model`, which is called unchanged. The actor inside it does not see the sampler's
      settings, so a context variable carries them.
"""

import functools
from contextvars import ContextVar
from importlib import metadata
from typing import Any

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


def about(worker: Any, loss: str, *, observed: bool = False) -> dict[str, Any]:
    """Returns the settings of a verl run for `run.json`. None if this worker does not know one.

    Args:
        worker: verl's `TrainingWorker`.
        loss: The name of its policy loss.
        observed: Whether the recorded region only observes, and verl's own loss trains.
    """
    setting = reader(_CONFIG.get() or {})
    engine, model = worker.engine_config, worker.model_config
    settings = {
        "sampler": setting("rollout.name", None),
        "loss": loss,
        "strategy": engine.strategy,
        "completions_per_prompt": setting("rollout.n", None),
        "learning_rate": getattr(worker.optimizer_config, "lr", None),
        "seed": setting("rollout.seed", None),
    }
    return {
        "engine": {"name": "verl", "version": metadata.version("verl"), "settings": settings},
        "model": getattr(model, "path", None),
        "tokenizer": getattr(model, "tokenizer_path", None),
        "dtypes": {"trainer": _forward_dtype(worker), "sampler": setting("rollout.dtype", None)},
        "sampling": {name: setting(f"rollout.{name}", None) for name in ("temperature", "top_p", "top_k", "min_p")},
        "region_role": "observed" if observed else None,
    }


def _forward_dtype(worker: Any) -> str | None:
    """Returns the dtype of the trainer's forward pass: FSDP's mixed precision, or Megatron's setting."""
    dtype = getattr(worker.engine, "_autocast_dtype", None) or getattr(worker.engine_config, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")

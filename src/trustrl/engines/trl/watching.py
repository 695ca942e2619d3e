"""A stand-in for the model that TRL's loss calls, so that its one forward pass serves the region as well."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trustrl.engines.forward import KEYWORD, Wanted, gather_head
from trustrl.errors import EngineError


class WatchedModel:
    """Calls the model as TRL asks, adds the region's wishes (made from TRL's labels), and keeps what came out."""

    def __init__(self, model: Any, wanted: Callable[[Tensor], Wanted] | None) -> None:
        self._model = model
        self._wanted = wanted
        self._grad = torch.is_grad_enabled()
        self.outputs: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass.

        Raises:
            EngineError: TRL asks for it in a way this adapter does not know.
        """
        if "labels" not in kwargs or not kwargs.get("fused_lm_head"):
            raise EngineError(
                "TRL's loss must call the model with `labels` and `fused_lm_head=True`, got "
                f"{sorted(kwargs)}. Install a TRL version listed in trustrl's documentation."
            )
        if self._wanted is not None:
            kwargs[KEYWORD] = self._wanted(kwargs["labels"])
        gather_head(self._model)
        # The caller turns gradients on to read TRL's reduction, also in evaluation; the model must not notice.
        with torch.set_grad_enabled(self._grad):
            out = self._model(*args, **kwargs)
        self.outputs.append(out)
        # A token the region will count as faulty and leave out must not turn TRL's own terms into NaN.
        logp = out.log_probs
        blanked = torch.where(logp.isfinite(), logp, 0.0)
        return SimpleNamespace(log_probs=blanked, entropy=out.entropy, aux_loss=getattr(out, "aux_loss", None))

    def output(self) -> Any:
        """What the model returned.

        Raises:
            EngineError: it was not called exactly once.
        """
        if len(self.outputs) != 1:
            raise EngineError(
                f"TRL's loss must call the model exactly once, got {len(self.outputs)} calls. "
                "Install a TRL version listed in trustrl's documentation."
            )
        return self.outputs[0]

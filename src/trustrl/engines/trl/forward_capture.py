"""Capture of the forward pass that TRL's loss makes, so that the region can reuse it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trustrl.engines.common.vocabulary_forward import KEYWORD, gather_head
from trustrl.engines.common.vocabulary_read import Wanted
from trustrl.errors import EngineError

Score = Callable[..., tuple[Any, ...]]
"""TRL's `_get_per_token_logps_and_entropies`: (log-probs, entropies or None, more in some releases)."""


class Seen(NamedTuple):
    """One captured forward pass."""

    logp: Tensor
    """(B, T): log-probs of the completion tokens, as the model returned them."""

    entropy: Tensor | None
    output: Any
    """The model's output if the region reads more of the vocabulary than the sampled token, else None."""


class Capture:
    """The forward passes of one policy in one call of TRL's loss.

    Args:
        model: The policy that is passed to the loss.
        wanted: Maps TRL's labels to the part of the vocabulary that the region reads; None for regions on the sampled
            token.
    """

    def __init__(self, model: Any, wanted: Callable[[Tensor], Wanted] | None) -> None:
        self.model = model
        self._wanted = wanted
        self._grad = torch.is_grad_enabled()
        self.seen: list[Seen] = []

    def run(self, score: Score, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls TRL's own method and keeps its results."""
        gather_head(model)
        asking = None if self._wanted is None else AskingModel(model, self._wanted)
        # The caller enables gradients to read TRL's reduction, also in evaluation. The model runs with the caller's
        # setting.
        with torch.set_grad_enabled(self._grad):
            logp, entropy, *more = score(asking or model, *args, **kwargs)
        self.seen.append(Seen(logp, entropy, asking.outputs[0] if asking else None))
        # The region drops and counts tokens with a non-finite log-prob. They must not turn TRL's other terms into NaN.
        return (torch.where(logp.isfinite(), logp, 0.0), entropy, *more)


class AskingModel:
    """Model proxy that requests more of the vocabulary in each call, and keeps the outputs.

    Args:
        model: The model, whose forward takes the keyword of `VocabularyForward`.
        wanted: Maps TRL's labels to the part of the vocabulary that the region reads.
    """

    def __init__(self, model: Any, wanted: Callable[[Tensor], Wanted]) -> None:
        self._model = model
        self._wanted = wanted
        self.outputs: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one forward pass.

        Raises:
            EngineError: If the call has no labels.
        """
        if kwargs.get("labels") is None or not kwargs.get("fused_lm_head"):
            raise EngineError(
                "TRL's _get_per_token_logps_and_entropies must call the model with `labels` and `fused_lm_head=True`, "
                f"got {sorted(kwargs)}. Install a TRL version listed in trustrl's documentation, or choose a region on "
                "the sampled token such as trustrl.preset('dppo-binary-tv')."
            )
        kwargs[KEYWORD] = self._wanted(kwargs["labels"])
        self.outputs.append(self._model(*args, **kwargs))
        return self.outputs[-1]

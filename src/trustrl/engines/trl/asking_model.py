"""Model proxy for TRL's fused output layer, through which a region reads more of the vocabulary."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.common.unrounded_model import unrounded
from trustrl.engines.common.vocabulary_forward import KEYWORD
from trustrl.engines.common.vocabulary_read import Opaque, VocabularyOutput, Wanted
from trustrl.errors import EngineError


class AskingModel:
    """Model proxy that requests more of the vocabulary in each call, and keeps the outputs.

    Args:
        model: The model, whose forward takes the keyword of `VocabularyForward`.
        wanted: Maps TRL's labels to the N tokens to score, and to what the region reads there.
    """

    def __init__(self, model: Any, wanted: Callable[[Tensor], tuple[TokenPlaces, Wanted]]) -> None:
        self._model = unrounded(model)
        self._wanted = wanted
        self.outputs: list[Any] = []
        """The output of each call, with one row per token."""
        self.places: list[TokenPlaces] = []
        """The tokens of each call."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one forward pass. Returns log-probs and entropies in TRL's shape, (B, T).

        Raises:
            EngineError: If the call has no labels.
        """
        if kwargs.get("labels") is None or not kwargs.get("fused_lm_head"):
            raise EngineError(
                "TRL's _get_per_token_logps_and_entropies must call the model with `labels` and `fused_lm_head=True`, "
                f"got {sorted(kwargs)}. Install a TRL version listed in trustrl's documentation, or choose a region on "
                "the sampled token such as trustrl.preset('dppo-binary-tv')."
            )
        where, wanted = self._wanted(kwargs["labels"])
        # A keyword of the model's own forward: the hooks of DDP, FSDP and PEFT run. Opaque: none of them casts it.
        kwargs[KEYWORD] = Opaque(wanted)
        output = self._model(*args, **kwargs)
        self.places.append(where)
        self.outputs.append(output)
        return VocabularyOutput(log_probs=where.padded(output.log_probs), entropy=where.padded(output.entropy))

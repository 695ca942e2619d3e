"""More of the vocabulary than the sampled token, read from the states that enter the model's output layer."""

from typing import Any

from torch import Tensor

from trustrl.engines.common.vocabulary_forward import read_head
from trustrl.engines.common.vocabulary_read import VocabularyOutput, Wanted, read_vocabulary
from trustrl.errors import EngineError


class AskingModel:
    """Model proxy that runs the forward pass unchanged, and reads the vocabulary from the same hidden states.

    Costs one more product with the output layer, in tiles, and no further pass through the model.

    Args:
        model: The model that the trainer calls.
        base: The model inside its wrappers, which has the output layer.
        wanted: The request. Its `states` map the inputs of the output layer.
    """

    def __init__(self, model: Any, base: Any, wanted: Wanted) -> None:
        self._model, self._base, self._wanted = model, base, wanted
        self.outputs: list[VocabularyOutput] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one forward pass.

        Raises:
            EngineError: If the pass does not call the output layer once.
        """
        seen: list[Tensor] = []
        layer = self._base.get_output_embeddings()
        hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
        try:
            output = self._model(*args, **kwargs)
        finally:
            hook.remove()
        if len(seen) != 1:
            raise EngineError(
                f"The model must call its output layer once in a forward pass, got {len(seen)} calls. Choose a region "
                "on the sampled token such as dppo-binary-tv."
            )
        states = self._wanted.states(seen[0])
        self.outputs.append(read_vocabulary(states, read_head(self._base), self._wanted))
        return output

"""Model forward pass that returns the engine's own logits, and what a region reads of the vocabulary with them.

For engines that compute log-probs from logits themselves. The logits stay as the model returned them: engines divide
them in place by the temperature. The read happens inside the forward pass, from the states that enter the output
layer. FSDP2 has the layer's weight gathered there. It gathers the weight again for the backward pass of every tensor in
a field of the output, so `LogitsOutput` declares the fields.
"""

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from trustrl.engines.common.unrounded_model import unrounded
from trustrl.engines.common.vocabulary_forward import KEYWORD, VocabularyForward
from trustrl.engines.common.vocabulary_read import Opaque, VocabularyOutput, Wanted
from trustrl.errors import EngineError


@dataclass
class LogitsOutput(VocabularyOutput):
    """The fields of a model's output that engines use, and the vocabulary."""

    logits: Tensor | None = None
    aux_loss: Tensor | None = None


class LogitsForward(VocabularyForward):
    """Adds the keyword to one model's forward, which runs unchanged and returns its logits too.

    Costs one more product with the output layer, in tiles, and no further pass through the model.
    """

    def _run(self, model: Any, wanted: Wanted, *args: Any, **kwargs: Any) -> LogitsOutput:
        entering: list[Tensor] = []
        layer = model.get_output_embeddings()
        hook = layer.register_forward_hook(lambda module, inputs, output: entering.append(inputs[0]))
        try:
            output = self._original(*args, **kwargs)
        finally:
            hook.remove()
        if len(entering) != 1:
            raise EngineError(
                f"The model must call its output layer once in a forward pass, got {len(entering)} calls. Choose a "
                "region on the sampled token such as dppo-binary-tv."
            )
        read = self._read(model, wanted.states(entering[0]), wanted)
        parts = {field.name: getattr(read, field.name) for field in fields(read)}
        return LogitsOutput(**parts, logits=output.logits, aux_loss=getattr(output, "aux_loss", None))


class AskingModel:
    """Model proxy that makes one request in every call, and keeps the outputs.

    Args:
        model: The model that the trainer calls, whose forward takes the keyword of `LogitsForward`.
        wanted: The request. Its `states` map the inputs of the output layer.
    """

    def __init__(self, model: Any, wanted: Wanted) -> None:
        self._model, self._wanted = unrounded(model), wanted
        self.outputs: list[LogitsOutput] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> LogitsOutput:
        """Runs one forward pass."""
        kwargs[KEYWORD] = Opaque(self._wanted)
        self.outputs.append(self._model(*args, **kwargs))
        return self.outputs[-1]

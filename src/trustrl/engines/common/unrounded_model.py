"""Model proxy that returns outputs as the forward pass computed them, where FSDP2 would round them.

accelerate shards a model with an `output_dtype` of bf16 or fp16. FSDP2 then casts every floating tensor of the model's
output after the forward pass, log-probs included. A log-prob of -10 keeps three digits.
"""

from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule


class UnroundedModel:
    """Model proxy whose outputs keep the dtype that the forward pass gave them.

    FSDP2 registers its backward hooks on the tensors of the output before it casts them, so a loss on the tensors
    before the cast has the same gradient.

    Args:
        model: The sharded model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one forward pass."""
        computed: list[Any] = []
        hook = self._model.register_forward_hook(
            lambda module, inputs, output: computed.append(output),
            prepend=True,  # before FSDP2's own hook, which casts
        )
        try:
            output = self._model(*args, **kwargs)
        finally:
            hook.remove()
        for name, x in computed[0].items():
            # Logits come from rounded products: the wider copy would cost memory and hold no more digits.
            if name != "logits" and isinstance(x, Tensor) and output[name].dtype != x.dtype:
                output[name] = x
        return output


def unrounded(model: Any) -> Any:
    """Returns the model, in a proxy if FSDP2 may round its outputs."""
    return UnroundedModel(model) if isinstance(model, FSDPModule) else model

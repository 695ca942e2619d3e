"""What verl's FSDP engine asks for by name, whatever its settings say, and only a GPU has.

A critic is loaded with flash-attention, and a reference model is offloaded to pinned memory.
"""

from typing import Any

from transformers import AutoModelForTokenClassification
from verl.utils import model
from verl.workers.engine.fsdp import transformer_impl

from trustrl.engines import seam
from trustrl.errors import EngineError

CALLED_WITH = ("local_path", "torch_dtype", "model_config", "trust_remote_code")


def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """verl's function of this name, with an attention that a CPU has."""
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code,
        attn_implementation="eager",
    )  # fmt: skip


def no_offload(pin_memory: bool = True) -> None:
    """In the place of `CPUOffloadPolicy`: the weights are in the CPU's memory already."""


def install() -> None:
    """Puts both where verl's engine looks for them, in this process.

    Raises:
        EngineError: verl does not look there, or calls them in another way.
    """
    seam.require_parameters(model, "load_valuehead_model", CALLED_WITH)
    if not hasattr(transformer_impl, "CPUOffloadPolicy"):
        raise EngineError(
            f"{transformer_impl.__name__} must have the name CPUOffloadPolicy, and it does not. Install a version of "
            "verl that trustrl's documentation lists."
        )
    model.load_valuehead_model = load_valuehead_model
    transformer_impl.CPUOffloadPolicy = no_offload  # pyright: ignore[reportAttributeAccessIssue]

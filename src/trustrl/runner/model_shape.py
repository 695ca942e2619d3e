"""Sizes of a model that a plan needs: from the recipe or from the model's files."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from trustrl.runner.recipe_tables import Model

KNOWN = {
    "tiny": (722_304, 128, 512),
    "tiny-tied": (656_768, 128, 512),
    "tiny-long": (426_752, 128, 512),
    "tiny-long-llama": (426_624, 128, 512),
    "smollm2-135m": (134_515_008, 576, 49_152),
}
"""Parameters, hidden size and vocabulary size of the models that `trustrl.world.models` creates."""


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; None if unknown."""

    parameters: int | None
    expert_parameters: int | None
    hidden_size: int | None
    vocab_size: int | None


def shape_of(model: Model) -> Shape:
    """Returns the model's sizes: from the recipe if given, else from the known models or a directory's files."""
    folder = Path(model.name)
    parameters, hidden, vocabulary = KNOWN.get(model.name, (None, None, None))
    if model.name not in KNOWN and (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        hidden, vocabulary = config.get("hidden_size"), config.get("vocab_size")
        files = sorted(folder.glob("*.safetensors"))
        parameters = sum(map(_count, files)) if files else None
    return Shape(
        model.parameters or parameters,
        model.expert_parameters,
        model.hidden_size or hidden,
        model.vocab_size or vocabulary,
    )


def _count(file: Path) -> int:
    """Counts the parameters in a safetensors file from its header."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")

"""How large a model is: from its files where they are on this machine, otherwise from the recipe."""

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
"""Parameters, width and vocabulary of the models `trustrl.models` makes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What memory follows from; None where nobody says."""

    parameters: int | None
    hidden_size: int | None
    vocab_size: int | None


def shape_of(model: Model) -> Shape:
    """The recipe's own numbers first, then the files of a folder, then what we know of our own models."""
    folder = Path(model.name)
    parameters, hidden, vocabulary = KNOWN.get(model.name, (None, None, None))
    if model.name not in KNOWN and (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        hidden, vocabulary = config.get("hidden_size"), config.get("vocab_size")
        files = sorted(folder.glob("*.safetensors"))
        parameters = sum(map(_count, files)) if files else None
    return Shape(model.parameters or parameters, model.hidden_size or hidden, model.vocab_size or vocabulary)


def _count(file: Path) -> int:
    """Numbers in a safetensors file, from its header."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")

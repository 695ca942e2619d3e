"""Sizes of a model that a plan needs: from the recipe or from the model's files."""

import math
from dataclasses import dataclass
from pathlib import Path

from trustrl.errors import ConfigError
from trustrl.files import LARGEST_HEADER, parsed_json, read_regular, safetensors_header
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
        hidden, vocabulary = _sizes(folder / "config.json")
        files = sorted(folder.glob("*.safetensors"))
        parameters = sum(map(_count, files)) if files else None
    return Shape(
        model.parameters or parameters,
        model.expert_parameters,
        model.hidden_size or hidden,
        model.vocab_size or vocabulary,
    )


def _sizes(file: Path) -> tuple[int | None, int | None]:
    """Returns the hidden size and the vocabulary's size in a model's configuration."""
    try:
        config = parsed_json(read_regular(file, LARGEST_HEADER))
        hidden, vocabulary = (config.get(name) for name in ("hidden_size", "vocab_size"))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.name must be a folder with a model, got {file}: {error!r:.200}.") from None
    if not all(size is None or (type(size) is int and size > 0) for size in (hidden, vocabulary)):
        raise ConfigError(
            f"{file} must have sizes that are integers from 1, got {hidden!r:.40} and {vocabulary!r:.40}."
        )
    return hidden, vocabulary


def _count(file: Path) -> int:
    """Counts the parameters in a safetensors file from its header."""
    try:
        count = sum(math.prod(entry["shape"]) for entry in safetensors_header(file)[1].values())
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"model.name must be a folder with a model, got {file}: {error!r:.200}.") from None
    if type(count) is not int or not 0 <= count < 10**15:
        raise ConfigError(f"{file} must have tensors with sizes from 0, got {count!r:.40} parameters.")
    return count

"""Memory estimate of a plan, and the model's size that it needs: from the recipe or from the model's files."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from trustrl.runner.policy_roles import Roles
from trustrl.runner.recipe import Recipe
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
VERL_LOGITS = 4.4
"""Memory of verl's own pass over whole logits, in float32 arrays of tokens × vocabulary. We measured 2,724 MB at
1,024 × 151,936 (docs/engines/verl.md)."""

DYNAMIC_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens in one of verl's micro-batches if the recipe sets no micro-batch."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; None if unknown."""

    parameters: int | None
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
    return Shape(model.parameters or parameters, model.hidden_size or hidden, model.vocab_size or vocabulary)


def _count(file: Path) -> int:
    """Counts the parameters in a safetensors file from its header."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def memory(recipe: Recipe, shape: Shape, found: Roles, counts: dict[str, int]) -> dict[str, int | None]:
    """Estimates the bytes on each rank, without activations and the sampler's KV cache.

    Returns:
        Bytes by purpose, and their total. None stands for an unknown size.
    """
    ranks = recipe.engine.ranks
    width, on_trl = BYTES[recipe.model.dtype], recipe.engine.name == "trl"
    split = 1 if on_trl else ranks  # each TRL rank holds everything, unless accelerate's configuration shards it
    total = shape.parameters
    sampler_copies = not on_trl or recipe.sampler.kind == "vllm"
    needs = recipe.region.needs()
    tokens = -(-counts["completion_tokens_per_batch"] // ranks)
    found_bytes: dict[str, int | None] = {
        "weights": _times(total, width / split),
        "gradients": _times(total, width / split),
        "adam": _times(total, 2 * width / split),
        "sampler_weights": _times(total, BYTES[recipe.sampler.dtype] / recipe.sampler.ranks) if sampler_copies else 0,
        "logits": 0 if on_trl or needs.topk or needs.full else _verl_logits(recipe, shape.vocab_size),
        "region_records": _times(found.record_bytes, tokens),
    }
    if needs.full:
        head = None if shape.hidden_size is None or shape.vocab_size is None else shape.hidden_size * shape.vocab_size
        found_bytes["copy_of_the_output_layer"] = _times(head, width)
    known = [value for value in found_bytes.values() if value is not None]
    return found_bytes | {"total": sum(known) if len(known) == len(found_bytes) else None}


def _times(count: int | None, factor: float) -> int | None:
    return None if count is None else round(count * factor)


def _verl_logits(recipe: Recipe, vocabulary: int | None) -> int | None:
    rows = recipe.engine.micro_batch
    length = recipe.schedule.max_prompt_tokens + recipe.schedule.max_completion_tokens
    share = recipe.schedule.sequences_per_step // recipe.engine.ranks * length
    tokens = rows * length if rows else min(share, DYNAMIC_TOKENS[recipe.engine.device])
    return _times(vocabulary, VERL_LOGITS * 4 * tokens)

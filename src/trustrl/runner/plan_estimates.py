"""Estimates of a plan: GPU hours and price from a throughput that the user gives, and memory by purpose."""

from dataclasses import dataclass
from typing import Any

from trustrl.config import validators
from trustrl.runner.layout import Layout
from trustrl.runner.model_shape import BYTES, Shape
from trustrl.runner.recipe import Recipe
from trustrl.runner.region_costs import micro_batch_tokens, padded_bytes, region_cost, words

VERL_LOGITS = 4.4
"""Memory of FSDP's own pass over whole logits, in float32 arrays of tokens × vocabulary. We measured 2,724 MB at
1,024 × 151,936 (docs/engines/verl.md)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a run's sampling and training.

        GPU hours = completion tokens / (3,600 × tokens per second and GPU),   price = GPU hours × price of one

    Evaluations, start-up and repeated steps are not included.
    """

    tokens: int
    """Completion tokens of the whole run."""

    gpus: int
    """Number of GPUs; of processes, on CPUs."""

    tokens_per_second: float | None
    """Completion tokens that one GPU samples and trains in a second. None if unknown, and so is the cost."""

    price: float | None
    """Price of a GPU hour."""

    def __post_init__(self) -> None:
        for option, value in (("--tokens-per-second", self.tokens_per_second), ("--price", self.price)):
            if value is not None:
                validators.real(option, value, rule="a finite number > 0", low=0.0, high=1e15)

    @property
    def gpu_hours(self) -> float | None:
        """Hours of one GPU."""
        return None if self.tokens_per_second is None else self.tokens / (3600 * self.tokens_per_second)

    @property
    def total(self) -> float | None:
        """Price of the run."""
        return None if self.gpu_hours is None or self.price is None else self.gpu_hours * self.price

    def to_dict(self) -> dict[str, Any]:
        """Returns the cost as plain data."""
        hours = self.gpu_hours
        return {"gpu_hours": hours, "hours": None if hours is None else hours / self.gpus, "price": self.total}

    def text(self) -> list[str]:
        """Formats the cost with its formulas, and the options that are missing."""
        lines, hours, total = ["Cost (without evaluations, start-up and repeated steps)"], self.gpu_hours, self.total
        if hours is None:
            lines.append(
                "  GPU hours     give --tokens-per-second, the completion tokens that a GPU samples and trains"
            )
        else:
            lines += [
                "  GPU hours     completion tokens / (3,600 × tokens per second and GPU) = "
                f"{self.tokens:,} / (3,600 × {self.tokens_per_second:,g}) = {_short(hours)}",
                f"  duration      GPU hours / GPUs = {_short(hours)} / {self.gpus} = {_short(hours / self.gpus)} hours",
            ]
            if total is not None:
                lines.append(f"  price         GPU hours × price = {_short(hours)} × {self.price:,g} = {_short(total)}")
        if self.price is None:
            lines.append("  price         give --price, the price of a GPU hour")
        return [*lines, ""]


def _short(x: float) -> str:
    return f"{x:,.1f}" if x >= 100 else f"{x:.3g}"


def memory(recipe: Recipe, shape: Shape, layout: Layout) -> dict[str, int | None]:
    """Estimates the bytes on each rank, without activations and the sampler's KV cache.

    With several pipeline stages, this is a rank of the last one, and the stages are taken to be of equal size.

    Returns:
        Bytes by purpose, and their total. None stands for an unknown size.
    """
    width, on_trl = BYTES[recipe.model.dtype], recipe.engine.name == "trl"
    sampler_copies = not on_trl or recipe.sampler.kind == "vllm"
    # Each TRL rank holds everything, unless accelerate's configuration shards it.
    share = 1 if on_trl else recipe.engine.ranks
    trained = _trained(recipe, shape)
    model = _on_megatron(recipe, shape, layout) if layout.megatron else {
        "weights": _times(shape.parameters, width / share),
        "gradients": _times(trained, width / share),
        "adam": _times(trained, 2 * width / share),
    }  # fmt: skip
    parts = {
        **model,
        "sampler_weights": _times(shape.parameters, BYTES[recipe.sampler.dtype] / recipe.sampler.ranks)
        if sampler_copies
        else 0,
        **_of_region(recipe, shape, layout),
    }
    known = [value for value in parts.values() if value is not None]
    return parts | {"total": sum(known) if len(known) == len(parts) else None}


def _trained(recipe: Recipe, shape: Shape) -> int | None:
    """Returns the number of trained parameters: all of them, or those of the adapters, which are estimated."""
    if recipe.lora is None:
        return shape.parameters
    if shape.parameters is None or shape.vocab_size is None or shape.hidden_size is None:
        return None
    return recipe.lora.parameters(shape.parameters - shape.vocab_size * shape.hidden_size, shape.hidden_size)


def _on_megatron(recipe: Recipe, shape: Shape, layout: Layout) -> dict[str, int | None]:
    """Returns the model's own memory with verl's defaults: float32 gradients, and an optimizer split over all ranks."""
    width, ranks = BYTES[recipe.model.dtype], recipe.engine.ranks
    on_rank = _parameters_on_rank(shape, layout)
    copy = 4 if width < 4 else 0  # a float32 copy of the weights next to Adam's two moments
    return {
        "weights": _times(on_rank, width),
        "gradients": _times(on_rank, 4),
        "adam": _times(shape.parameters, (8 + copy) / ranks),
    }


def _parameters_on_rank(shape: Shape, layout: Layout) -> int | None:
    experts, split = shape.expert_parameters, layout.expert_ranks
    if shape.parameters is None or (experts is None and split != layout.tensor_parallel):
        return None
    experts = experts or 0
    per_stage = (shape.parameters - experts) / layout.tensor_parallel + experts / split
    return round(per_stage / layout.pipeline_parallel)


def _of_region(recipe: Recipe, shape: Shape, layout: Layout) -> dict[str, int | None]:
    """Returns the memory of the region, and of the logits or the vocabulary pass that it reads."""
    needs, cost = recipe.region.needs(), region_cost(recipe, recipe.region.kind, layout, shape, chosen=True)
    sizes: dict[str, int | None] = {}
    if recipe.engine.name == "trl":
        sizes["logits"] = 0
    elif needs.topk or needs.full:
        sizes["vocabulary_pass"] = cost.vocabulary_pass_bytes
    elif layout.megatron:  # not measured: at least one float32 array
        sizes["logits_at_least"] = _times(words(layout, shape), 4 * micro_batch_tokens(recipe, layout))
    else:
        sizes["logits"] = _times(shape.vocab_size, VERL_LOGITS * 4 * micro_batch_tokens(recipe, layout))
    sizes["region_records"] = cost.record_bytes
    sizes["region_loss"] = cost.loss_bytes
    sizes["padded_by_the_engine"] = padded_bytes(recipe, layout)
    if needs.full:
        sizes["copy_of_the_output_layer"] = cost.output_layer_copy_bytes
    return sizes


def _times(count: int | None, factor: float) -> int | None:
    return None if count is None else round(count * factor)

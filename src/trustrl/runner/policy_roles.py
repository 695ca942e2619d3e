"""Roles of the policies in a recipe: the source of each one's log-probs, and the cost of recording them."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from trustrl.engines.common.region_needs import sources
from trustrl.errors import ConfigError
from trustrl.runner.model_shape import BYTES
from trustrl.runner.recipe import Recipe
from trustrl.runner.verl_command import computed_dtype

FLOAT, TOP_PAIR = 4, 8


@dataclass(frozen=True, slots=True)
class Roles:
    """The policies that a region compares, as text for the plan."""

    behavior: str
    """The policy that sampled, and the source of its log-probs."""

    proximal: str
    """The source of the policy's log-probs before a batch's first update."""

    anchor: str
    """The one of the two that the region measures divergence from."""

    distribution: str
    """The policy whose most probable ids or full distribution is recorded, and the way it is recorded."""

    passes: tuple[str, ...]
    """Forward passes in addition to the engine's own, for each batch of rollouts."""

    bytes_per_token: str
    """Memory for the region's records of each completion token, as a formula."""

    record_bytes: int | None
    """The same in bytes; None if the model's hidden size is unknown."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the roles as plain data."""
        return asdict(self)


def behavior_of(recipe: Recipe) -> Literal["sampler", "trainer"]:
    """Returns the source of log μ. On TRL, transformers samples with the trainer's network and records nothing."""
    return "trainer" if recipe.engine.name == "trl" and recipe.sampler.kind == "transformers" else "sampler"


def roles(recipe: Recipe, hidden_size: int | None) -> Roles:
    """Resolves the roles of a recipe."""
    needs, behavior = recipe.region.needs(), behavior_of(recipe)
    anchors, source = sources(needs, behavior, mismatch=False)
    if needs.full and source == "sampler":
        raise ConfigError(
            f"region.anchor must be 'proximal' with {recipe.region.kind} on this sampler, got 'behavior'. The "
            "region needs the anchor's full distribution, and a sampler records only some of its ids."
        )
    formula, number = _bytes_per_token(recipe, hidden_size)
    return Roles(
        behavior=_behavior(recipe, behavior),
        proximal=_proximal(recipe) if "proximal" in anchors else "not needed",
        anchor=needs.anchor,
        distribution=_distribution(recipe, source),
        passes=_passes(recipe, source, behavior),
        bytes_per_token=formula,
        record_bytes=number,
    )


def _behavior(recipe: Recipe, behavior: str) -> str:
    if behavior == "trainer":
        return "transformers with the trainer's network; log-probs from the trainer at the rollout weights"
    sampler = recipe.sampler
    kind = {"vllm": "vLLM", "transformers": "transformers"}[sampler.kind]
    return f"{kind} in {sampler.dtype}; log-probs recorded while sampling, after temperature"


def _proximal(recipe: Recipe) -> str:
    return f"the trainer in {computed_dtype(recipe)}; log-probs at the weights before a batch's first update"


def _distribution(recipe: Recipe, source: str) -> str:
    needs = recipe.region.needs()
    if source == "nobody":
        return "not needed: the region uses the sampled token only"
    what = f"the {needs.topk} most probable ids of the {needs.anchor} policy" if needs.topk else (
        f"the full distribution of the {needs.anchor} policy, as last hidden states"
    )  # fmt: skip
    how = {
        "sampler": "recorded by the sampler while it decodes",
        "trainer": "one forward pass of the trainer at the rollout weights",
    }[source]
    return f"{what}: {how}"


def _passes(recipe: Recipe, source: str, behavior: str) -> tuple[str, ...]:
    needs, passes = recipe.region.needs(), []
    if source == "trainer":
        passes.append("one forward pass of the trainer without gradients, for the anchor's distribution")
    elif (
        recipe.engine.name == "trl"
        and recipe.schedule.updates_per_batch == 1  # with more updates, TRL computes these itself
        and (behavior == "trainer" or "proximal" in needs.anchors)
    ):
        passes.append("one forward pass of the trainer without gradients, for the anchor's log-probs")
    return tuple(passes)


def _bytes_per_token(recipe: Recipe, hidden: int | None) -> tuple[str, int | None]:
    """Returns the memory of a completion token's records as a formula and in bytes; None if D is unknown."""
    needs = recipe.region.needs()
    if recipe.engine.name == "trl":
        total = FLOAT * len(needs.anchors)
        parts, tail = [str(total)], FLOAT
    else:  # verl keeps the anchors' log-probs itself
        parts, total, tail = [], 0, 0 if needs.anchor == "behavior" else 2 * FLOAT
    if needs.topk:
        parts.append(f"8 K{f' + {tail}' if tail else ''} (K = {needs.topk})")
        total += TOP_PAIR * needs.topk + tail
    if needs.full:
        width = BYTES[computed_dtype(recipe)]
        parts.append(f"{width} D + {tail} (D = {hidden or 'unknown'})")
        if hidden is None:
            return " + ".join(parts), None
        total += width * hidden + tail
    return " + ".join(parts) or "0", total

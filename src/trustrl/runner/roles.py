"""Who plays which policy in a recipe, how it is recorded, and what that costs beside the engine's own work."""

from dataclasses import dataclass
from typing import Any, Literal

from trustrl.engines.roles import sources
from trustrl.errors import ConfigError
from trustrl.runner.recipe import Recipe

FLOAT, TOP_PAIR = 4, 8


@dataclass(frozen=True, slots=True)
class Roles:
    """The policies a region is measured between."""

    behavior: str
    """Who sampled, and who says with which log-probs."""

    proximal: str
    """Who says what the policy was before a batch's first update."""

    anchor: str
    """Which of the two the region is measured from."""

    distribution: str
    """Whose most probable ids or whole distribution is recorded, and how."""

    passes: tuple[str, ...]
    """Forward passes beside the engine's own, for each batch of rollouts."""

    bytes_per_token: str
    """What the region records for each completion token, as a formula."""

    record_bytes: int | None
    """The same as a number; None where the model's width is not known."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


def behavior_of(recipe: Recipe) -> Literal["sampler", "trainer"]:
    """Who records μ: on TRL, transformers samples with the trainer's own network and records nothing."""
    return "trainer" if recipe.engine.name == "trl" and recipe.sampler.kind == "transformers" else "sampler"


def roles(recipe: Recipe, hidden_size: int | None) -> Roles:
    """The resolved roles.

    Raises:
        ConfigError: the region needs a distribution that nobody records.
    """
    needs, behavior = recipe.region.needs(), behavior_of(recipe)
    anchors, source = sources(needs, behavior, mismatch=False)
    if needs.full and source == "sampler":
        raise ConfigError(
            f"region.anchor must be 'proximal' with {recipe.region.kind} on this sampler, got 'behavior'. It needs the "
            "anchor's whole distribution, and a sampler records some ids of it at most."
        )
    on_trl = recipe.engine.name == "trl"
    formula, number = (_trl_bytes if on_trl else _verl_bytes)(recipe, hidden_size)
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
        return "transformers with the trainer's own network; its log-probs at the rollout weights"
    sampler = recipe.sampler
    kind = {"vllm": "vLLM", "transformers": "transformers"}[sampler.kind]
    return f"{kind} in {sampler.dtype}; the log-probs it recorded as it sampled, after temperature"


def _proximal(recipe: Recipe) -> str:
    return f"the trainer in {recipe.model.dtype}; its log-probs at the weights before a batch's first update"


def _distribution(recipe: Recipe, source: str) -> str:
    needs = recipe.region.needs()
    if source == "nobody":
        return "not needed: the sampled token decides"
    what = f"the {needs.topk} most probable ids of the {needs.anchor} policy" if needs.topk else (
        f"the whole distribution of the {needs.anchor} policy, as last hidden states"
    )  # fmt: skip
    how = {
        "sampler": "the sampler scores the finished sequences at the weights that sampled",
        "trainer": "a forward pass of the trainer at the rollout weights",
    }[source]
    return f"{what}: {how}"


def _passes(recipe: Recipe, source: str, behavior: str) -> tuple[str, ...]:
    needs, found = recipe.region.needs(), []
    if source == "sampler":
        twice = recipe.engine.name == "verl" and recipe.sampler.temperature != 1.0
        found.append(f"{'two prefills' if twice else 'one prefill'} of each finished sequence in the sampler")
    elif source == "trainer":
        found.append("one forward pass of the trainer without gradient, for the anchor's distribution")
    elif (
        recipe.engine.name == "trl"
        and recipe.schedule.updates_per_batch == 1  # for more updates, TRL computes these itself
        and (behavior == "trainer" or "proximal" in needs.anchors)
    ):
        found.append("one forward pass of the trainer without gradient, for the anchor's log-probs")
    return tuple(found)


def _trl_bytes(recipe: Recipe, hidden: int | None) -> tuple[str, int | None]:
    needs = recipe.region.needs()
    parts, total = [f"{FLOAT * len(needs.anchors)}"], FLOAT * len(needs.anchors)
    return _with_distribution(recipe, parts, total, hidden, tail=FLOAT)


def _verl_bytes(recipe: Recipe, hidden: int | None) -> tuple[str, int | None]:
    needs = recipe.region.needs()
    tail = 0 if needs.anchor == "behavior" else 2 * FLOAT
    return _with_distribution(recipe, [], 0, hidden, tail=tail)


def _with_distribution(
    recipe: Recipe, parts: list[str], total: int, hidden: int | None, *, tail: int
) -> tuple[str, int | None]:
    needs = recipe.region.needs()
    if needs.topk:
        parts.append(f"8 K{f' + {tail}' if tail else ''} (K = {needs.topk})")
        total += TOP_PAIR * needs.topk + tail
    if needs.full:
        width = 4 if recipe.model.dtype == "float32" else 2
        parts.append(f"{width} D + {tail} (D = {hidden or 'unknown'})")
        if hidden is None:
            return " + ".join(parts), None
        total += width * hidden + tail
    return " + ".join(parts) or "0", total

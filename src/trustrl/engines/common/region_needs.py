"""The log-probs and the part of the vocabulary that a region reads, known from its settings alone."""

from typing import Literal

from trustrl.config.axes import Needs, Region
from trustrl.config.statistics import Anchor

Behavior = Literal["sampler", "trainer"]
"""The source of μ: the sampler's recorded log-probs, or the trainer's own (if the trainer's model generates)."""

Source = Literal["sampler", "trainer", "nobody"]


def sources(needs: Needs, behavior: Behavior, *, mismatch: bool) -> tuple[frozenset[Anchor], Source]:
    """Returns the anchors whose log-probs must be recorded, and the source of the anchor's distribution.

    Args:
        needs: The region's needs.
        behavior: The source of μ.
        mismatch: Whether the mismatch between sampler and trainer is measured, which records both anchors.

    Returns:
        The anchors, and "sampler", "trainer", or "nobody" (if the region reads only the sampled token).
    """
    measured: frozenset[Anchor] = frozenset({"proximal"}) if mismatch else frozenset()
    anchors = needs.anchors | measured
    if not (needs.topk or needs.full):
        return anchors, "nobody"
    return anchors, "trainer" if needs.anchor == "proximal" or behavior == "trainer" else "sampler"


def by_trainer(needs: Needs, behavior: Behavior) -> bool:
    """Returns whether the trainer computes every log-prob that the region reads."""
    return behavior == "trainer" or needs.anchors == {"proximal"}


def more_than_sampled_tokens(region: Region) -> list[str]:
    """Returns the parts of the vocabulary that the region reads in addition to the sampled token, in words."""
    needs = region.needs()
    more = {f"the {needs.topk} most probable ids": needs.topk, "the whole vocabulary": needs.full}
    return [part for part, needed in more.items() if needed]

"""Who says what each policy was: known from the settings alone, before anything is loaded."""

from typing import Literal

from trustrl.config.axes import Needs
from trustrl.config.statistics import Anchor

Source = Literal["sampler", "trainer", "nobody"]


def sources(
    needs: Needs, behavior: Literal["sampler", "trainer"], *, mismatch: bool
) -> tuple[frozenset[Anchor], Source]:
    """(whose log-probs to record, who says what the anchor's distribution was: sampler, trainer or nobody)."""
    measured: frozenset[Anchor] = frozenset({"proximal"}) if mismatch else frozenset()
    anchors = needs.anchors | measured
    if not (needs.topk or needs.full):
        return anchors, "nobody"
    return anchors, "trainer" if needs.anchor == "proximal" or behavior == "trainer" else "sampler"


def by_trainer(needs: Needs, behavior: Literal["sampler", "trainer"]) -> bool:
    """Returns whether every log-prob that the region reads is the trainer's own."""
    return behavior == "trainer" or needs.anchors == {"proximal"}

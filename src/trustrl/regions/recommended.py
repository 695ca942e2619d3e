"""Regions that the project recommends, with their evidence in docs/guides/choosing-a-region.md.

Snippets, recipes, the plan and the healthy bands follow this table; a test compares them with it.
"""

from trustrl.config.axes import Needs

SAMPLED_TOKEN, TOP_K = "dppo-binary-tv-capped", "dppo-topk-tv-capped"
"""Presets for a sampler that records the log-prob of the sampled token alone, and for one that records its top K."""

MASKED_SHARE = {4: 0.05, 16: 0.35}
"""Largest share of masked tokens that is healthy at the last of so many updates on a rollout. With 16 the recommended
regions masked 0.11 (sampled token) and 0.34 (top K) in the second study; with 4 uncapped ones masked 0.01."""


def recommended(needs: Needs) -> str:
    """Returns the name of the recommended preset for the values that a region reads."""
    return TOP_K if needs.topk or needs.full else SAMPLED_TOKEN


def healthy_masked_share(updates: int | None) -> float:
    """Returns the largest healthy share of masked tokens for a number of updates on a rollout; None is few."""
    return MASKED_SHARE[16 if updates is not None and updates > 4 else 4]

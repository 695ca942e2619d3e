"""Rows that describe the NeMo RL settings that do not work with a region. They load without torch and NeMo RL."""

from collections.abc import Callable
from typing import Any

from trustrl.config.axes import Region
from trustrl.engines.refusals.rows import (
    TRUNCATED,
    Given,
    Refusal,
    Scope,
    fixed,
    is_set,
    not_averaged_over_tokens,
    switch,
)

LOSS, GENERATION = "loss_fn", "policy.generation"
_OWN = "It belongs to NeMo RL's own clip, which the region replaces. Set the region in loss_fn.trustrl_region."
_ON_TRAINER_ALONE = Scope("anchored on the trainer alone", lambda needs: "behavior" not in needs.anchors)


def _own(name: str, must_be: str, example: Any, refused: Callable[[Any, Given, Region], bool] = is_set) -> Refusal:
    setting = f"{LOSS}.{name}"
    return Refusal(setting=setting, must_be=must_be, why=_OWN, refused=refused, example={setting: example})


ROWS = (
    _own("ratio_clip_min", "0.2, the default,", 0.1, lambda value, lookup, region: value not in (None, 0.2)),
    _own("ratio_clip_max", "0.2, the default,", 0.28, lambda value, lookup, region: value not in (None, 0.2)),
    _own("ratio_clip_c", "null", 3.0),
    _own("disable_ppo_ratio", "false", True),
    _own("use_cispo", "false", True),
    _own("sequence_level_importance_ratios", "false", True),
    switch(f"{LOSS}.force_on_policy_ratio", "NeMo RL would fill prev_logprobs with zeros.", "false"),
    Refusal(
        setting=f"{LOSS}.truncated_importance_sampling_type",
        must_be="null",
        why="Only NeMo RL's own clip applies it. The regions tis, icepop and mis correct for π'/μ.",
        refused=is_set,
        example={f"{LOSS}.truncated_importance_sampling_type": "tis"},
    ),
    Refusal(
        setting=f"{LOSS}.use_importance_sampling_correction",
        must_be="false",
        why="Only NeMo RL's own clip applies it. Give the region a correction, or anchor it on the sampler.",
        refused=is_set,
        scope=_ON_TRAINER_ALONE,
        example={f"{LOSS}.use_importance_sampling_correction": True},
        preset="ppo",
        region={"anchor": "proximal"},
    ),
    not_averaged_over_tokens(f"{LOSS}.token_level_loss", "false"),
    fixed(f"{GENERATION}.top_p", "1.0", TRUNCATED, 0.9, default=1.0),
    Refusal(
        setting=f"{GENERATION}.top_k",
        must_be="null",
        why=TRUNCATED,
        refused=lambda value, lookup, region: value is not None and value > 0,
        example={f"{GENERATION}.top_k": 50},
    ),
)
"""Every row, in the order of the check."""

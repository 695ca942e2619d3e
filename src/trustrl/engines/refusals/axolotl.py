"""Rows that describe the axolotl settings that do not work with a region.

The plugin checks them while axolotl reads the YAML file. TRL's rows follow when the trainer is created. Imports neither
torch nor axolotl, so the documentation can list the rows anywhere.
"""

from typing import Any

from trustrl.config.axes import Region
from trustrl.engines.refusals.rows import Given, Refusal, sampled_only

TRAINER = "trustrl.engines.axolotl.TrustRegionTrainer"
"""The value of `trainer_cls`."""

_ASYNC = "axolotl's asynchronous trainer computes its own loss, which the region would not reach."


def _on(value: Any, given: Given, region: Region) -> bool:
    return bool(value)


ROWS = (
    Refusal(
        setting="rl",
        must_be="grpo or gdpo",
        why="Regions replace the clip of GRPO.",
        refused=lambda rl, given, region: rl not in ("grpo", "gdpo"),
        example={"rl": "dpo"},
    ),
    Refusal(
        setting="trainer_cls",
        must_be=f"{TRAINER} or a subclass",
        why="If a plugin cannot be imported, axolotl prints the error and trains without it. It raises if the trainer "
        "cannot be imported.",
        refused=lambda name, given, region: not name,
        example={"trainer_cls": None},
    ),
    sampled_only("trust_region", "which needs TRL 1.15. axolotl pins TRL 1.9. Use TRL or verl."),
    Refusal(
        setting="trl.async_prefetch",
        must_be="false",
        why=_ASYNC,
        refused=_on,
        example={"trl.async_prefetch": True},
    ),
    Refusal(
        setting="trl.use_data_producer",
        must_be="false",
        why=f"{_ASYNC} The replay buffer and re-rolling belong to it.",
        refused=_on,
        example={"trl.use_data_producer": True},
    ),
    Refusal(
        setting="context_parallel_size",
        must_be="1",
        why="axolotl would split each sequence between ranks, and the region reads whole sequences.",
        refused=lambda size, given, region: size > 1,
        default=1,
        example={"context_parallel_size": 2},
    ),
    Refusal(
        setting="nemo_gym_enabled",
        must_be="false",
        why="NeMo Gym replaces the rollout after the trainer has checked it. Pass a rollout with log-probs as "
        "trl.rollout_func.",
        refused=_on,
        example={"nemo_gym_enabled": True},
    ),
)
"""Every row, in the order of the check."""

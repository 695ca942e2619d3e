"""Rows that describe the axolotl settings that do not work with a region.

The plugin checks them while axolotl reads the YAML file. TRL's rows follow when the trainer is created. Imports neither
torch nor axolotl, so the documentation can list the rows anywhere.
"""

from trustrl.engines.refusals.rows import EXACT, Refusal, at_most, switch, unfit

TRAINER = "trustrl.engines.axolotl.TrustRegionTrainer"
"""The value of `trainer_cls`."""

_ASYNC = "axolotl's asynchronous trainer computes its own loss, which the region would not reach."


ROWS = (
    Refusal(
        setting="rl", must_be="grpo or gdpo", refused=lambda rl, lookup, region: rl not in ("grpo", "gdpo"),
        why="Regions replace the clip of GRPO.",
    ),
    Refusal(
        setting="trainer_cls", must_be=f"{TRAINER} or a subclass", refused=lambda name, lookup, region: not name,
        why="If a plugin cannot be imported, axolotl prints the error and trains without it. It raises if the trainer "
        "cannot be imported.",
    ),
    unfit(
        "trust_region", "Top-K or on the sampled token",
        "Exact divergences need TRL 1.15. axolotl pins TRL 1.9. Use TRL or verl.", EXACT,
    ),
    switch("trl.async_prefetch", _ASYNC, "false"),
    switch("trl.use_data_producer", f"{_ASYNC} The replay buffer and re-rolling belong to it.", "false"),
    at_most(
        "context_parallel_size", 1,
        "axolotl would split each sequence between ranks, and the region reads whole sequences.",
    ),
    switch(
        "nemo_gym_enabled",
        "NeMo Gym replaces the rollout after the trainer has checked it. Pass a rollout with log-probs as "
        "trl.rollout_func.",
        "false",
    ),
)  # fmt: skip
"""Every row, in the order of the check."""

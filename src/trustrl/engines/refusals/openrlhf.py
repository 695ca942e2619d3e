"""Rows that describe the OpenRLHF arguments that do not work with a region.

Imports neither torch nor OpenRLHF, so the documentation can list the rows anywhere.
"""

from trustrl.config.terms import SequenceMeanTokenMean, TokenMean
from trustrl.engines.refusals.rows import (
    ON_SAMPLER,
    Refusal,
    Scope,
    average_per_sequence,
    not_asynchronous,
    sampled_only,
    whole_vocabulary,
)

LEVEL, MODE = "--algo.advantage.is_correction_level", "--actor.loss_agg_mode"
REDUCTIONS = {"token-mean": TokenMean, "seq-mean-token-mean": SequenceMeanTokenMean}
"""Maps OpenRLHF's `--actor.loss_agg_mode` to reductions."""

_NOT_ON_SAMPLER = Scope("anchored on the trainer alone", lambda needs: "behavior" not in needs.anchors)
_BOUNDS = "It belongs to OpenRLHF's own loss. Set a region's bounds in --trustrl.region."
_CORRECTION = (
    "OpenRLHF's own loss applies it, and a region replaces that loss. Use a preset with a correction: tis, icepop, "
    "mis, divergence-gate."
)

ROWS = (
    sampled_only("--trustrl.region", "and OpenRLHF passes only sampled log-probs to a loss. TRL and verl support it."),
    Refusal(
        setting=LEVEL,
        must_be="token",
        why="Only then does OpenRLHF ask vLLM for log-probs. The region replaces the loss that would apply the "
        "correction, so nothing is corrected twice.",
        refused=lambda level, lookup, region: level != "token",
        default="off",
        scope=ON_SAMPLER,
    ),
    Refusal(
        setting=LEVEL,
        must_be="off",
        why=_CORRECTION,
        refused=lambda level, lookup, region: level != "off",
        default="off",
        scope=_NOT_ON_SAMPLER,
    ),
    Refusal("--actor.eps_clip", "left at 0.2", _BOUNDS, 0.2),
    Refusal(
        setting="--actor.eps_clip_low_high",
        must_be="left out",
        why=_BOUNDS,
        # OpenRLHF itself fills in an unset value with --actor.eps_clip.
        refused=lambda bounds, lookup, region: (
            bounds is not None and tuple(bounds) != (lookup("--actor.eps_clip", 0.2),) * 2
        ),
    ),
    Refusal("--actor.dual_clip", "left out", _BOUNDS),
    Refusal(
        setting="--actor.policy_loss_type",
        must_be="left at ppo",
        why="It belongs to OpenRLHF's own loss. Use --trustrl.region gspo.",
        default="ppo",
    ),
    Refusal("--algo.advantage.is_correction_mode", "left at mask", _CORRECTION, "mask"),
    Refusal("--algo.advantage.is_correction_gating", "left at ratio", _CORRECTION, "ratio"),
    Refusal(
        setting="--algo.advantage.is_correction_threshold",
        must_be="left at (0.5, 5.0)",
        why=_CORRECTION,
        default=(0.5, 5.0),
        refused=lambda bounds, lookup, region: tuple(bounds) != (0.5, 5.0),
    ),
    average_per_sequence(MODE, REDUCTIONS, "seq-mean-token-mean", "token-mean"),
    not_asynchronous("--train.async_enable", "left out", "OpenRLHF", '"anchor": "behavior"'),
    whole_vocabulary("--rollout.top_p", "top_p", "1.0", 1.0),
)
"""Every row, in the order of the check."""

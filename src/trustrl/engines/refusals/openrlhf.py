"""Rows that describe the OpenRLHF arguments that do not work with a region.

Imports neither torch nor OpenRLHF, so the documentation can list the rows anywhere.
"""

from typing import Any

from trustrl.config.terms import SequenceMeanTokenMean, TokenMean
from trustrl.engines.refusals.rows import (
    ON_SAMPLER,
    Given,
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
_THEIRS = {
    "--actor.eps_clip": (0.2, _BOUNDS),
    "--actor.eps_clip_low_high": (None, _BOUNDS),
    "--actor.dual_clip": (None, _BOUNDS),
    "--actor.policy_loss_type": ("ppo", "It belongs to OpenRLHF's own loss. Use --trustrl.region gspo."),
    "--algo.advantage.is_correction_mode": ("mask", _CORRECTION),
    "--algo.advantage.is_correction_gating": ("ratio", _CORRECTION),
    "--algo.advantage.is_correction_threshold": ((0.5, 5.0), _CORRECTION),
}
"""Settings of OpenRLHF's loss: the default, and the reason why another value must not be set."""


def _changed(default: Any, value: Any, lookup: Given) -> bool:
    value = tuple(value) if isinstance(value, list) else value
    clip = lookup("--actor.eps_clip", 0.2)
    if default is None and value == (clip, clip):  # OpenRLHF fills in --actor.eps_clip_low_high itself
        return False
    return value != default


def _of_their_loss(name: str) -> Refusal:
    default, why = _THEIRS[name]
    return Refusal(
        setting=name,
        must_be=f"left at {default}" if default is not None else "left out",
        why=why,
        refused=lambda value, lookup, region: _changed(default, value, lookup),
        default=default,
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
    *map(_of_their_loss, _THEIRS),
    average_per_sequence(MODE, REDUCTIONS, "seq-mean-token-mean", "token-mean"),
    not_asynchronous("--train.async_enable", "left out", "OpenRLHF", '"anchor": "behavior"'),
    whole_vocabulary("--rollout.top_p", "top_p", "1.0", 1.0),
)
"""Every row, in the order of the check."""

"""Rows that describe the arguments of slime, and of its fork miles, that do not work with a region.

Imports neither torch nor slime, so the documentation can list the rows anywhere.
"""

from collections.abc import Callable
from typing import Any

from trustrl.config.axes import Region
from trustrl.engines.refusals.rows import PER_SEQUENCE, TRUNCATED, Given, Refusal, Scope, other_than

_WHOLE_SEQUENCES = Scope("that decide on whole sequences (GSPO, TRM, MIS)", lambda needs: needs.sequences)
_OWN_LOSS = "It belongs to slime's own policy loss, which does not run. Set the region's bounds in trustrl_region."


def _flag(
    name: str, must_be: str, why: str, example: Any, refused: Callable[[Any, Given, Region], bool], default: Any = None
) -> Refusal:
    return Refusal(
        setting=f"--{name}", must_be=must_be, why=why, refused=refused, default=default, example={f"--{name}": example}
    )


def _is_set(value: Any, given: Given, region: Region) -> bool:
    return bool(value)


ROWS = (
    _flag(
        "loss-type",
        "custom_loss",
        "With another loss, slime never calls the region.",
        "policy_loss",
        other_than("custom_loss"),
        default="policy_loss",
    ),
    _flag("eps-clip", "0.2, slime's default,", _OWN_LOSS, 0.3, other_than(0.2), default=0.2),
    _flag(
        "eps-clip-high",
        "unset",
        _OWN_LOSS,
        0.28,
        # slime itself fills an unset value with --eps-clip
        lambda value, given, region: value not in (None, given("--eps-clip", 0.2)),
    ),
    _flag("eps-clip-c", "unset", _OWN_LOSS, 3.0, lambda value, given, region: value is not None),
    _flag(
        "use-tis",
        "off",
        "slime's own policy loss applies it, which does not run. A region anchored on the sampler already contains "
        "π'/μ; the presets tis, icepop and mis correct for it.",
        True,
        _is_set,
    ),
    _flag(
        "use-opsm", "off", "slime's own policy loss applies it, which does not run. Use the region opsm.", True, _is_set
    ),
    _flag(
        "advantage-estimator",
        "an estimator of advantages alone",
        "gspo and cispo are GRPO's advantages with a loss that does not run. Use grpo, and the region gspo or cispo.",
        "gspo",
        lambda value, given, region: value in ("gspo", "cispo"),
        default="grpo",
    ),
    _flag(
        "use-unbiased-kl",
        "off",
        "It would multiply the KL term by a ratio that the region does not bound.",
        True,
        _is_set,
    ),
    _flag(
        "custom-pg-loss-reducer-function-path",
        "unset",
        "slime's own policy loss calls it, which does not run.",
        "my.reducer",
        _is_set,
    ),
    _flag("rollout-top-p", "1.0", TRUNCATED, 0.9, other_than(1.0), default=1.0),
    _flag("rollout-top-k", "-1", TRUNCATED, 50, lambda value, given, region: value > 0, default=-1),
    Refusal(
        setting="--calculate-per-token-loss",
        must_be="off",
        why="{region}'s gradient is defined per sequence.",
        refused=_is_set,
        scope=PER_SEQUENCE,
        words={"region": "GSPO"},
        example={"--calculate-per-token-loss": True},
        preset="gspo",
    ),
    Refusal(
        setting="--context-parallel-size",
        must_be="1",
        why="{region} decides on whole sequences, and context parallelism passes a rank only parts of them.",
        refused=lambda value, given, region: value > 1,
        default=1,
        scope=_WHOLE_SEQUENCES,
        example={"--context-parallel-size": 2},
        preset="gspo",
    ),
)
"""Every row, in the order of the check."""

"""Which of verl's settings go with a region, and a sentence for each that does not."""

from collections.abc import Mapping
from typing import Any

from trustrl.config.axes import Needs, Region
from trustrl.engines.settings import PENALISED, TRUNCATED, refuse
from trustrl.engines.verl.losses import REDUCTIONS
from trustrl.engines.verl.region import region_of

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
_BOUNDS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
_TEMPERATURES = {"tau_pos": 1.0, "tau_neg": 1.05}


def check_settings(config: Mapping[str, Any]) -> Region:
    """Refuses what would bypass the region, count the mismatch twice, or make a ratio of two different things.

    Args:
        config: verl's whole configuration, as `main_ppo` gets it.

    Returns:
        The region that the run will use.

    Raises:
        ConfigError: with the setting and what to do.
    """
    region = region_of(_at(config, f"{ACTOR}.policy_loss.loss_mode"), _at(config, f"{ACTOR}.policy_loss"))
    needs = region.needs()
    _check_trainer(config)
    _check_loss(config, region, needs)
    if needs.anchor == "behavior":
        _check_behavior(config, region)
    else:
        _check_proximal(config, region)
    _check_sampling(config)
    return region


def _at(config: Any, path: str, default: Any = None) -> Any:
    for name in path.split("."):
        config = config.get(name, None) if config is not None else None
    return default if config is None else config


def _check_trainer(config: Any) -> None:
    if not _at(config, "trainer.use_v1", True):
        refuse(
            "trainer.use_v1",
            "True",
            False,
            "verl's old trainer replaces loss_mode in bypass mode, and the region would not act.",
        )


def _check_loss(config: Any, region: Region, needs: Needs) -> None:
    mode = _at(config, f"{ACTOR}.loss_agg_mode", "token-mean")
    if needs.reduction is not None and REDUCTIONS.get(mode) is not needs.reduction:
        fitting = [name for name, reduction in REDUCTIONS.items() if reduction is needs.reduction]
        refuse(
            f"{ACTOR}.loss_agg_mode", " or ".join(fitting), mode, f"{region.kind}'s gradient is defined per sequence."
        )
    for name, default in (_BOUNDS | _TEMPERATURES).items():
        value = _at(config, f"{ACTOR}.{name}", default)
        if value != default:
            refuse(
                f"{ACTOR}.{name}", f"left at {default}", value,
                "It belongs to verl's own losses; a region's bounds are in policy_loss.region.",
            )  # fmt: skip


def _check_behavior(config: Any, region: Region) -> None:
    is_weights = _at(config, f"{CORRECTION}.rollout_is")
    if is_weights is not None:
        refuse(
            f"{CORRECTION}.rollout_is", "null", is_weights,
            f"{region.kind} is anchored on the sampler: its ratio already contains π'/μ. "
            "A region with anchor=proximal may keep verl's correction.",
        )  # fmt: skip
    if not _at(config, f"{CORRECTION}.bypass_mode", False):
        refuse(
            f"{CORRECTION}.bypass_mode", "True", False,
            f"{region.kind} is anchored on what the sampler recorded, and only in bypass mode verl hands that to its "
            "losses; otherwise it is the trainer's recomputed policy, which is region.anchor=proximal.",
        )  # fmt: skip
    if not _at(config, f"{ROLLOUT}.calculate_log_probs", False):
        refuse(f"{ROLLOUT}.calculate_log_probs", "True", False, "Without it the sampler records no log-probs.")
    rejection = _at(config, f"{CORRECTION}.rollout_rs")
    if rejection is not None:
        refuse(
            f"{CORRECTION}.rollout_rs", "null", rejection,
            "In bypass mode verl applies it in its own loss alone, so nothing would be rejected.",
        )  # fmt: skip
    mode, temperature = _at(config, f"{ROLLOUT}.logprobs_mode"), _at(config, f"{ROLLOUT}.temperature", 1.0)
    if mode not in (None, "processed_logprobs") and temperature != 1.0:
        refuse(
            f"{ROLLOUT}.logprobs_mode", "processed_logprobs", mode,
            f"Raw log-probs are not what was sampled from at temperature {temperature:g}.",
        )  # fmt: skip


def _check_proximal(config: Any, region: Region) -> None:
    if _at(config, f"{CORRECTION}.bypass_mode", False):
        refuse(
            f"{CORRECTION}.bypass_mode", "False", True,
            f"{region.kind} is anchored on the trainer's own policy, and in bypass mode verl hands the sampler's "
            "log-probs to its losses: that is region.anchor=behavior.",
        )  # fmt: skip


def _check_sampling(config: Any) -> None:
    top_p, top_k = _at(config, f"{ROLLOUT}.top_p", 1.0), _at(config, f"{ROLLOUT}.top_k", -1)
    if top_p < 1.0:
        refuse(f"{ROLLOUT}.top_p", "1.0", top_p, TRUNCATED)
    if top_k > 0:
        refuse(f"{ROLLOUT}.top_k", "-1", top_k, TRUNCATED)
    penalty = _at(config, f"{ROLLOUT}.repetition_penalty", 1.0)
    if penalty != 1.0:
        refuse(f"{ROLLOUT}.repetition_penalty", "1.0", penalty, PENALISED)

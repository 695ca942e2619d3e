"""The one setting to change for a cause, under the name that the trainer gives it, and its value."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trustrl.runs.run import Run

_NAMES = {
    "learning rate": {
        "trl": "learning_rate",
        "verl": "actor_rollout_ref.actor.optim.lr",
        "trustrl": "optimiser.learning_rate",
    },
    "updates per batch": {
        "trl": "steps_per_generation * num_iterations / gradient_accumulation_steps",
        "verl": "ppo_epochs * train_batch_size / ppo_mini_batch_size",
        "trustrl": "schedule.updates_per_batch",
    },
    "completion length": {
        "trl": "max_completion_length",
        "verl": "data.max_response_length",
        "trustrl": "schedule.max_completion_tokens",
    },
    "temperature": {
        "trl": "temperature",
        "verl": "actor_rollout_ref.rollout.temperature",
        "trustrl": "sampler.temperature",
    },
    "top_p": {"verl": "actor_rollout_ref.rollout.top_p", "trustrl": "sampler.top_p"},
    "top_k": {"verl": "actor_rollout_ref.rollout.top_k", "trustrl": "sampler.top_k"},
    "min_p": {"trustrl": "sampler.min_p"},
    "upper clip": {"trl": "epsilon_high", "verl": "actor_rollout_ref.actor.clip_ratio_high"},
}

SMALLEST_CUT = 3.0
"""Smallest factor by which a learning rate that broke a run is lowered."""

CLIP_HIGHER = 0.28
"""Upper clip of DAPO (arXiv:2503.14476, section 3.1), which lets the probability of rare tokens rise further."""

WIDER = 1.5
"""Factor on a region's `max_increase` after a collapse of the entropy."""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting and its value for the next run."""

    setting: str
    value: str
    now: str | None = None
    """Present value. None if the run's files do not contain it."""

    def words(self) -> str:
        """Returns the change in one line.

        Example:
            >>> Change("learning_rate", "1e-05", "0.0001").words()
            'learning_rate = 1e-05 (now 0.0001)'
        """
        return f"{self.setting} = {self.value}" + ("" if self.now is None else f" (now {self.now})")


def setting_name(run: Run, what: str) -> str:
    """Returns the name that the run's trainer gives to a setting."""
    return _NAMES[what].get("trustrl" if run.recipe else run.settings.engine or "", what)


def lower_learning_rate(run: Run, factor: float = SMALLEST_CUT) -> Change:
    """Returns a learning rate that is lower by at least this factor, rounded down to one digit."""
    rate, name = run.settings.learning_rate, setting_name(run, "learning rate")
    factor = max(factor, SMALLEST_CUT)
    if not rate:
        return Change(name, f"the present value / {math.ceil(factor):g}")
    target = rate / factor
    power = 10.0 ** math.floor(math.log10(target))
    return Change(name, f"{math.floor(target / power + 1e-9) * power:.0e}".replace("e-0", "e-"), f"{rate:g}")


def fewer_updates(run: Run, updates: int) -> Change:
    """Returns half of the updates on each batch."""
    return Change(setting_name(run, "updates per batch"), f"{max(1, updates // 2)}", f"{updates}")


def longer_completions(run: Run, longest: float | None) -> Change:
    """Returns twice the length limit."""
    value = "twice the present value" if longest is None else f"{2 * longest:.0f}"
    return Change(setting_name(run, "completion length"), value, None if longest is None else f"{longest:.0f}")


def no_truncation(run: Run) -> Change:
    """Returns the setting that truncates the sampler's distribution, switched off. Without settings, it is top-p."""
    settings = run.settings
    name, now, off = "top_p", settings.top_p, "1.0"
    if now in (None, 1.0) and settings.top_k and settings.top_k > 0:
        name, now, off = "top_k", settings.top_k, "-1" if settings.engine == "verl" else "0"
    elif now in (None, 1.0) and settings.min_p:
        name, now, off = "min_p", settings.min_p, "0.0"
    return Change(setting_name(run, name), off, None if now in (None, 1.0) else f"{now:g}")


def same_temperature(run: Run, factor: float | None) -> Change:
    """Returns the trainer's temperature for the sampler.

    Args:
        run: The run.
        factor: The sampler's temperature over the trainer's, if records show it.
    """
    trainers = run.settings.temperature
    value = "the trainer's" if trainers is None else f"{trainers:g}"
    now = (
        None if factor is None else f"about {factor * (trainers or 1.0):.2g}" + " x the trainer's" * (trainers is None)
    )
    return Change(f"{setting_name(run, 'temperature')} of the sampler", value, now)


def wider_region(run: Run) -> Change:
    """Returns a larger bound on increases: the region's own, or the upper clip of the trainer's loss."""
    bound = _bound(run.settings.region or {}, "region")
    if bound is not None:
        return Change(bound[0], f"{WIDER * bound[1]:.2g}", f"{bound[1]:g}")
    return Change(setting_name(run, "upper clip"), f"{CLIP_HIGHER}")


def _bound(settings: Mapping[str, Any], path: str) -> tuple[str, float] | None:
    """Returns the first `max_increase` below a table, with its path."""
    for key, value in settings.items():
        if key == "max_increase" and isinstance(value, (int, float)):
            return f"{path}.{key}", float(value)
        if isinstance(value, Mapping) and (inner := _bound(value, f"{path}.{key}")):
            return inner
    return None

"""Settings of a run, read from the configuration that TRL or verl stores: nested tables, or dotted names."""

from collections.abc import Iterator, Mapping
from typing import Any

from trustrl.errors import TrustRLError
from trustrl.regions.loading import config_to_dict
from trustrl.regions.presets import preset

OURS = "trustrl-"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TRL = {
    "learning_rate": "learning_rate", "temperature": "temperature", "top_p": "top_p", "min_p": "min_p", "seed": "seed",
    "num_generations": "completions_per_prompt",
}  # fmt: skip
_VERL = {
    "actor_rollout_ref.model.path": "model", f"{_ACTOR}.optim.lr": "learning_rate",
    f"{_ACTOR}.policy_loss.loss_mode": "loss", "trainer.total_training_steps": "steps_planned",
    f"{_ROLLOUT}.n": "completions_per_prompt", f"{_ROLLOUT}.temperature": "temperature", f"{_ROLLOUT}.top_p": "top_p",
    f"{_ROLLOUT}.min_p": "min_p", f"{_ROLLOUT}.dtype": "sampler_dtype", "data.seed": "seed",
}  # fmt: skip
_LONGEST = 1_000
"""Characters of the longest name. No setting that is read has more."""

_KINDS: dict[str, type | tuple[type, ...]] = {
    "learning_rate": (int, float), "temperature": (int, float), "top_p": (int, float), "min_p": (int, float),
    "completions_per_prompt": int, "steps_planned": int, "updates_per_batch": int, "seed": int, "top_k": int,
}  # fmt: skip


def flat(table: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the entries of nested tables by their dotted names, without names that no setting has: longer ones.

    Example:
        >>> dict(flat({"a": {"b": 1}, "c.d": 2}))
        {'a.b': 1, 'c.d': 2}
    """
    for key, value in table.items():
        if len(prefix) + (len(key) if isinstance(key, str) else 0) > _LONGEST:
            continue  # names of inner tables would grow with every level
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def settings_of(config: Mapping[Any, Any]) -> tuple[str | None, dict[str, Any]]:
    """Returns the trainer that a configuration belongs to, or None, and the fields of `RunSettings` in it.

    Example:
        >>> settings_of({"num_generations": 8, "num_iterations": 1, "temperature": 0.7, "output_dir": "out"})
        ('trl', {'temperature': 0.7, 'completions_per_prompt': 8})
    """
    entries = {key.replace("/", "."): value for key, value in flat(config)}
    if "actor_rollout_ref.model.path" in entries or f"{_ACTOR}.optim.lr" in entries:
        return "verl", _checked(_verl(entries))
    if {"num_generations", "num_iterations"} <= entries.keys():
        return "trl", _checked(_trl(entries))
    return None, {}


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings whose values have the expected type. Trackers may store numbers as text."""
    fields: dict[str, Any] = {}
    for name, value in settings.items():
        kind = _KINDS.get(name, (str, dict))
        if isinstance(value, str) and name in _KINDS:
            value = _parsed(value)
        if isinstance(value, (int, float)) and kind == (int, float) and not isinstance(value, bool):
            fields[name] = float(value)
        elif isinstance(value, kind) and not isinstance(value, bool):
            fields[name] = value
    return fields


def _parsed(text: str) -> float | int | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _trl(entries: Mapping[str, Any]) -> dict[str, Any]:
    settings = {ours: entries.get(theirs) for theirs, ours in _TRL.items()}
    settings["loss"] = entries.get("loss_type")
    settings["model"] = entries.get("_name_or_path") or entries.get("model_name_or_path")
    settings["top_k"] = _whole(entries.get("top_k"))
    iterations, parts, accumulated = (
        _whole(entries.get(name)) for name in ("num_iterations", "steps_per_generation", "gradient_accumulation_steps")
    )
    if iterations and parts and accumulated and parts * iterations % accumulated == 0:
        settings["updates_per_batch"] = iterations * parts // accumulated
    if (planned := _whole(entries.get("max_steps"))) and planned > 0:
        settings["steps_planned"] = planned
    return settings


def _verl(entries: Mapping[str, Any]) -> dict[str, Any]:
    settings = {ours: entries.get(theirs) for theirs, ours in _VERL.items()}
    batch, part, epochs = (
        _whole(entries.get(name))
        for name in ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.ppo_epochs")
    )
    if batch and part and epochs and batch % part == 0:
        settings["updates_per_batch"] = epochs * batch // part
    top_k = _whole(entries.get(f"{_ROLLOUT}.top_k"))
    settings["top_k"] = 0 if top_k == -1 else top_k  # both mean that sampling is not truncated
    loss = settings["loss"]
    if isinstance(loss, str) and loss.startswith(OURS):
        settings["region"] = _region(loss.removeprefix(OURS))
    return settings


def _whole(value: Any) -> int | None:
    if isinstance(value, str):
        value = _parsed(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _region(name: str) -> dict[str, Any] | None:
    try:
        return config_to_dict(preset(name))
    except TrustRLError:
        return None

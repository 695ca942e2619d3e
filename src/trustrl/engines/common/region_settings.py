"""A region's settings in a trainer's configuration and in its checkpoints.

A trainer's configuration names a preset as its policy loss and may override some of the preset's settings. A checkpoint
stores the region, so that resuming with a different region can be detected. Regions hold no other state between steps.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trustrl.config.axes import Region
from trustrl.errors import ConfigError, TrustRLWarning
from trustrl.regions.loading import config_from_dict, config_to_dict
from trustrl.regions.presets import ALIASES, override, preset, presets
from trustrl.registry import nearest

PREFIX = "trustrl"
"""`trustrl-<preset>` names that preset; `trustrl` alone names the region that the settings describe in full."""

CHECKPOINT_FILE = "trustrl_region.json"


class SettingNames(NamedTuple):
    """A trainer's names for the settings that choose a region, used in error messages."""

    name: str
    """The setting that names the loss."""

    region: str
    """The setting that describes the region."""

    how: str
    """An instruction for describing a region there."""


def names() -> list[str]:
    """Returns every loss name that trustrl registers: `trustrl`, and one for each preset and alias."""
    return [PREFIX, *(f"{PREFIX}-{name}" for name in sorted([*presets(), *ALIASES]))]


def is_region_name(name: str) -> bool:
    """Returns whether a loss name names a region."""
    return name == PREFIX or name.startswith(f"{PREFIX}-")


def region_named(name: str, fields: Any, settings: SettingNames) -> Region:
    """Returns the region with this name.

    Args:
        name: `trustrl-<preset>`, or `trustrl` for a region described in full.
        fields: The region's settings in the form that `trustrl.config_from_dict` reads. With a preset: only the
            settings that differ from it (see `trustrl.regions.presets.override`).
        settings: The trainer's names of both settings.

    Raises:
        ConfigError: If the name is not a trustrl name, or the settings do not fit the preset.
        UnknownNameError: If a `kind` is not registered.
    """
    short = settings.name.rpartition(".")[2]
    preset_name = name.removeprefix(f"{PREFIX}-")
    whole = name == PREFIX
    known = names()
    if not whole and name not in known:
        hint = f" Did you mean '{PREFIX}-{name}'?" if f"{PREFIX}-{name}" in known else nearest(name, known)
        raise ConfigError(f"{settings.name} must be a region's name, got {name!r}.{hint} Known: {', '.join(known)}.")
    if fields is not None and not isinstance(fields, Mapping):
        raise ConfigError(f"{settings.region} must be a dictionary of settings, got {fields!r}.")
    if whole:
        if not fields:
            raise ConfigError(
                f"{settings.region} must describe the region with {short}={PREFIX!r}, got {fields!r}. "
                f"{settings.how}, or name a preset: {short}={PREFIX}-dppo-binary-tv-capped."
            )
        region = config_from_dict(fields)
    else:
        region = preset(preset_name)
        if fields:
            advice = f"Use {short}={PREFIX!r}, which takes the whole region from {settings.region}."
            base = config_to_dict(region)
            _refuse_another_kind(base, fields, settings.region, f"{short}={name!r}", advice)
            region = override(region, fields)
    if not isinstance(region, Region):
        raise ConfigError(f"{settings.region} must describe a region, got {region!r}.")
    return region


def region_given(description: Any, setting: str) -> Region:
    """Returns the region that one setting describes, for engines that register no names.

    Args:
        description: A preset's name; or a dictionary with `preset` and the settings that differ from it; or a
            dictionary that describes a whole region, in the form that `trustrl.config_from_dict` reads. A string that
            begins with `{` is read as JSON, for environment variables.
        setting: The engine's name for the setting.

    Raises:
        ConfigError: If the setting has another form, or describes no region.
        UnknownNameError: If no preset has this name.
    """
    if isinstance(description, str) and description.lstrip().startswith("{"):
        try:
            description = json.loads(description)
        except ValueError as error:
            raise ConfigError(
                f"{setting} must be a preset's name or valid JSON, got {description!r}: {error}."
            ) from None
    if isinstance(description, str):
        return preset(description)
    if not isinstance(description, Mapping) or not description.keys() & {"preset", "kind"}:
        raise ConfigError(
            f"{setting} must be a preset's name, or a dictionary with `preset` or `kind`, got {description!r}. Try "
            "'dppo-binary-tv-capped'."
        )
    changes = {str(name): value for name, value in description.items() if name != "preset"}
    region = preset(description["preset"], **changes) if "preset" in description else config_from_dict(changes)
    if not isinstance(region, Region):
        raise ConfigError(f"{setting} must describe a region, got {region!r}.")
    return region


def _refuse_another_kind(
    base: Mapping[str, Any], fields: Mapping[str, Any], where: str, under: str, advice: str
) -> None:
    """Raises if an override changes a `kind` inside a preset: the preset's name would no longer be true."""
    for key, value in fields.items():
        before = base.get(key)
        if key == "kind" and value != before:
            raise ConfigError(f"{where}.kind must be {before!r} with {under}, got {value!r}. {advice}")
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            _refuse_another_kind(before, value, f"{where}.{key}", under, advice)


def write_to_checkpoint(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes the region's settings to a checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CHECKPOINT_FILE).write_text(json.dumps(settings, indent=1) + "\n")


def read_from_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Returns the settings that a checkpoint was trained with, or None if it does not contain them."""
    file = folder / CHECKPOINT_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def warn_if_changed(before: Mapping[str, Any] | None, now: Mapping[str, Any], step: Any) -> None:
    """Warns if the checkpoint was trained with different settings of the region, which is allowed."""
    if before is not None and before != now:
        warnings.warn(
            f"The checkpoint at step {step} was trained with the region {json.dumps(before)}; training resumes with "
            f"{json.dumps(now)}.",
            TrustRLWarning,
            stacklevel=3,
        )

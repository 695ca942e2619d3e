"""Which region a trainer's loss name asks for: the preset in the name, and what the settings beside it say."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from trustrl.config.axes import Region
from trustrl.config.loading import config_from_dict, config_to_dict
from trustrl.config.presets import ALIASES, override, preset, presets
from trustrl.errors import ConfigError
from trustrl.registry import nearest

PREFIX = "trustrl"
"""`trustrl-<preset>` is that preset; `trustrl` alone is the region that the settings describe in full."""


class Settings(NamedTuple):
    """Where a trainer's configuration keeps the two, for its errors."""

    name: str
    """The setting that names the loss."""

    region: str
    """The setting that describes the region."""

    how: str
    """How such a description is given there."""


def names() -> list[str]:
    """Returns every loss name that trustrl registers: `trustrl`, and one for each preset and alias."""
    return [PREFIX, *(f"{PREFIX}-{name}" for name in sorted([*presets(), *ALIASES]))]


def is_ours(name: str) -> bool:
    """Whether the name of a loss names a region."""
    return name == PREFIX or name.startswith(f"{PREFIX}-")


def region_named(name: str, given: Any, settings: Settings) -> Region:
    """The region of this name.

    Args:
        name: `trustrl-<preset>`, or `trustrl` for a region described in full.
        given: Its settings as `trustrl.config_from_dict` reads them. Beside a preset: only what differs from it
            (see `trustrl.config.presets.override`).
        settings: Where both were said.

    Raises:
        ConfigError: it is none of ours, or its settings do not fit the preset.
        UnknownNameError: a `kind` nobody registered.
    """
    short = settings.name.rpartition(".")[2]
    preset_name = name.removeprefix(f"{PREFIX}-")
    whole = name == PREFIX
    known = names()
    if not whole and name not in known:
        hint = f" Did you mean '{PREFIX}-{name}'?" if f"{PREFIX}-{name}" in known else nearest(name, known)
        raise ConfigError(f"{settings.name} must be a region's name, got {name!r}.{hint} Known: {', '.join(known)}.")
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{settings.region} must be a dictionary of settings, got {given!r}.")
    if whole:
        if not given:
            raise ConfigError(
                f"{settings.region} must describe the region with {short}={PREFIX!r}, got {given!r}. "
                f"{settings.how}, or name a preset: {short}={PREFIX}-dppo-binary-tv."
            )
        region = config_from_dict(given)
    else:
        region = preset(preset_name)
        if given:
            advice = f"Use {short}={PREFIX!r}, which takes the whole region from {settings.region}."
            base = config_to_dict(region)
            _refuse_another_kind(base, given, settings.region, f"{short}={name!r}", advice)
            region = override(region, given)
    if not isinstance(region, Region):
        raise ConfigError(f"{settings.region} must describe a region, got {region!r}.")
    return region


def _refuse_another_kind(
    base: Mapping[str, Any], given: Mapping[str, Any], where: str, under: str, advice: str
) -> None:
    """What a preset's settings are of may not change, or the name would lie."""
    for key, value in given.items():
        before = base.get(key)
        if key == "kind" and value != before:
            raise ConfigError(f"{where}.kind must be {before!r} with {under}, got {value!r}. {advice}")
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            _refuse_another_kind(before, value, f"{where}.{key}", under, advice)


def more_than_sampled_tokens(region: Region) -> list[str]:
    """What the region reads of the vocabulary beside the sampled token, in words."""
    needs = region.needs()
    more = {f"the {needs.topk} most probable ids": needs.topk, "the whole vocabulary": needs.full}
    return [what for what, needed in more.items() if needed]

"""Presets: every published region by name, with its published defaults."""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any

from trustrl.config.axes import Region
from trustrl.regions import add_installed, catalogue, presets_of
from trustrl.regions.loading import config_from_dict, config_to_dict, laid_over
from trustrl.registry import Registry

ALIASES: dict[str, str] = {}
"""Short names that `preset` accepts too."""


def _add(module: ModuleType) -> None:
    for name, make in presets_of(module).items():
        PRESETS.register(name)(make)
    ALIASES.update(getattr(module, "ALIASES", {}))


PRESETS: Registry[Callable[[], Region]] = Registry("preset", lambda: add_installed(_add))

for _module in catalogue():
    _add(_module)


def presets() -> list[str]:
    """Returns the sorted names of all presets, without aliases."""
    return sorted(PRESETS)


def preset(name: str, **overrides: Any) -> Region:
    """Returns the named region with its published defaults and any overrides.

    Overrides follow the same rule in recipes and in engine configurations: see `override`.

    Raises:
        UnknownNameError: If there is no such preset. The message suggests the nearest name.
        ConfigError: If an override does not fit the region.

    Examples:
        >>> preset("dppo-binary-tv", max_increase=0.2).divergence.bounds
        (0.2, 0.2)
        >>> preset("dppo-binary-tv", divergence={"max_increase": 0.2}, max_ratio=5.0).max_ratio
        5.0
    """
    return override(PRESETS[ALIASES.get(name, name)](), overrides)


def override(region: Region, settings: Mapping[str, Any]) -> Region:
    """Returns the region with some settings replaced.

    A nested mapping changes only the settings that it names. A settings object or a mapping of another `kind` replaces
    the whole object. A setting of a nested object may be given by its own name if only one of them has it:
    `max_increase` is `divergence.max_increase` in DPPO. If both bounds were equal, one given bound sets both.

    Raises:
        ConfigError: If a setting does not exist or its value does not fit.
    """
    if not settings:
        return region
    changes = {name: config_to_dict(value) if is_dataclass(value) else value for name, value in settings.items()}
    return config_from_dict(laid_over(config_to_dict(region), changes))

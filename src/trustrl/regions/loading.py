"""Conversion of settings to and from plain dictionaries, for TOML, JSON and command lines.

Every settings object is `{"kind": <its kind>, <field>: <value>, ...}`. Nested objects are nested dictionaries.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import ModuleType
from typing import Any

from trustrl.config.axes import PrefixBudget, Region
from trustrl.config.statistics import STATISTICS, Statistic, settings_of
from trustrl.config.terms import (
    MIS,
    TIS,
    DivergenceGate,
    EntropyBonus,
    FixedLength,
    IcePop,
    KLPenalty,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    TokenMean,
    TokenSum,
)
from trustrl.errors import ConfigError
from trustrl.regions import add_installed, catalogue, classes
from trustrl.registry import Registry, nearest

_OTHERS = (
    PrefixBudget, TIS, IcePop, MIS, DivergenceGate, KLPenalty, EntropyBonus,
    TokenSum, TokenMean, SequenceMeanTokenMean, SequenceMeanTokenSum, FixedLength,
)  # fmt: skip


def _add(module: ModuleType) -> None:
    for region in classes(module):
        if KINDS.get(region.kind) is not region:  # its module may have registered it
            KINDS.register(region.kind)(region)


KINDS: Registry[type] = Registry("settings kind", lambda: add_installed(_add))
"""Every settings class by its `kind`. Registering a region adds its class."""

# Without looking a kind up: that would load other packages, whose regions must come last.
for _class in (*STATISTICS, *_OTHERS, *(region for _module in catalogue() for region in classes(_module))):
    KINDS.register(_class.kind)(_class)

Decide = Callable[[Any, Any], Any]
"""(`CleanTokens`, settings) → `Decision`."""


def register_region(settings_class: type[Region]) -> Callable[[Decide], Decide]:
    """Registers a region under its settings class's `kind`, with a function as its `decide`.

    The region then works with `policy_loss` and loads from dictionaries. A class that defines `decide(tokens)` or
    `axes()` itself decides without being registered.

    Raises:
        ConfigError: If the class is not a `Region`.
        DuplicateNameError: If the kind is already registered.
    """
    # Callers may run without a type checker.
    if not (isinstance(settings_class, type) and issubclass(settings_class, Region)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"A region's settings must be a subclass of trustrl.regions.Region, got {settings_class!r}.")

    def add(decide: Decide) -> Decide:
        KINDS.register(settings_class.kind)(settings_class)
        settings_class.decide = lambda self, tokens: decide(tokens, self)
        return decide

    return add


def config_from_dict(data: Mapping[str, Any]) -> Any:
    """Builds the settings object that a plain dictionary describes.

    Raises:
        ConfigError: If `kind` is missing, or a key or value does not fit its class.
        UnknownNameError: If the `kind` is not registered.

    Examples:
        >>> config_from_dict({"kind": "dppo", "divergence": {"kind": "binary-tv", "max_increase": 0.2}}).kind
        'dppo'
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str):
        raise ConfigError(
            f"Settings must be a dictionary with a 'kind', got {data!r}. Known kinds: {', '.join(sorted(KINDS))}."
        )
    settings_class: Any = KINDS[data["kind"]]
    known = {field.name: field for field in fields(settings_class)}
    values = {key: value for key, value in data.items() if key != "kind"}
    for key in values:
        if key not in known:
            raise ConfigError(
                f"{data['kind']} has no setting {key!r}.{nearest(str(key), list(known))} "
                f"It has: {', '.join(known) or 'none'}."
            )
    missing = [
        name
        for name, field in known.items()
        if name not in values and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"{data['kind']} must be given {', '.join(missing)}, which have no default. Add them.")
    return settings_class(**{key: _value(value) for key, value in values.items()})


def laid_over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings in the form of `config_to_dict` with some of them replaced, including nested ones.

    Another `kind` replaces the whole object. If a statistic's two bounds were equal, changing one changes both;
    otherwise the other keeps its value.

    Examples:
        >>> equal = {"kind": "binary-tv", "max_increase": 0.15, "max_decrease": 0.15}
        >>> laid_over(equal, {"max_increase": 0.2})
        {'kind': 'binary-tv', 'max_increase': 0.2}

    Raises:
        ConfigError: If a setting does not exist, or if several nested objects have it.
    """
    changes = _at_home(base, changes)
    merged = dict(base)
    if issubclass(KINDS[base["kind"]], Statistic) and base["max_increase"] == base["max_decrease"]:
        bounds = ("max_increase", "max_decrease")
        if sum(changes.get(bound) is not None for bound in bounds) == 1:
            merged = {key: value for key, value in base.items() if key not in bounds}
    for key, value in changes.items():
        before = base.get(key)
        if (
            isinstance(value, Mapping)
            and isinstance(before, Mapping)
            and value.get("kind", before["kind"]) == before["kind"]
        ):
            value = laid_over(before, value)
        merged[key] = value
    return merged


def _at_home(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Moves each setting that only a nested object has into that object."""
    if changes.get("kind", base["kind"]) != base["kind"]:
        return dict(changes)
    known = _names(base)
    nested = {name: _names(part) for name, part in base.items() if isinstance(part, Mapping)}
    moved = {key: value for key, value in changes.items() if key == "kind" or key in known}
    for key in changes.keys() - moved.keys():
        homes = [name for name, names in nested.items() if key in names]
        if len(homes) != 1:
            parts = "".join(f" Its {name} has: {', '.join(names)}." for name, names in nested.items())
            several = f" Use one of: {' or '.join(f'{home}.{key}' for home in homes)}." if homes else ""
            every = [*known, *(name for names in nested.values() for name in names)]
            raise ConfigError(
                f"{base['kind']} has no setting {key!r}.{several}{nearest(str(key), every)} It has: "
                f"{', '.join(known) or 'none'}.{parts}"
            )
        (home,) = homes
        before = moved.get(home, {})
        if not isinstance(before, Mapping):
            raise ConfigError(f"{base['kind']}.{key} must be left out when {home} is {before!r}: it belongs to {home}.")
        moved[home] = {**before, key: changes[key]}
    return moved


def _names(part: Mapping[str, Any]) -> list[str]:
    return [field.name for field in fields(KINDS[part["kind"]])]


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return config_from_dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_value, value))
    return math.inf if value == "inf" else value  # JSON cannot express infinity


def config_to_dict(config: Any) -> dict[str, Any]:
    """Returns the plain dictionary that `config_from_dict` turns into an equal object."""
    if not is_dataclass(config) or isinstance(config, type):
        raise ConfigError(f"Settings must be a trustrl settings object, got {config!r}.")
    plain: dict[str, Any] = {"kind": type(config).kind}  # type: ignore[attr-defined]
    return plain | {name: _plain(value) for name, value in settings_of(config).items()}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return config_to_dict(value)
    if isinstance(value, tuple):
        return list(map(_plain, value))
    return "inf" if value == math.inf else value

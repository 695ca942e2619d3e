"""Validators for settings. Each raises an error that names the setting, the rule and the value."""

import math
import sys
from collections.abc import Mapping
from typing import Any

from trustrl.errors import ConfigError


def real(where: str, value: Any, *, rule: str, low: float, high: float = math.inf, advice: str = "") -> float:
    """Returns `value` as a float in (low, high]. `rule` describes the range in words.

    Raises:
        ConfigError: If `value` is not a number, is NaN, or is outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
        raise ConfigError(f"{where} must be {rule}, got {value!r}.{' ' if advice else ''}{advice}")
    return float(value)


def non_negative(where: str, value: Any, *, advice: str = "") -> float:
    """Returns `value` as a finite float that is at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"{where} must be a finite number ≥ 0, got {value!r}.{' ' if advice else ''}{advice}")
    return float(value)


def whole(where: str, value: Any, *, low: int, advice: str = "") -> int:
    """Returns `value` as an int that is at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{where} must be a whole number ≥ {low}, got {value!r}.{' ' if advice else ''}{advice}")
    return value


def one_of(where: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises if `value` is not in `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{where} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")


def truth(where: str, value: Any) -> None:
    """Raises if `value` is not a bool. The string 'False' would count as true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, got {value!r}.")


def text(where: str, value: Any) -> None:
    """Raises if `value` is not a non-empty string of printable characters."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} must be a non-empty string, got {value!r}.")
    if not value.isprintable():
        raise ConfigError(f"{where} must not contain control characters, got {value!r:.200}.")


def table(where: str, value: Any) -> None:
    """Raises if `value` is not a table."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a table, got {value!r}.")


def several(where: str, value: Any, what: str) -> tuple[Any, ...]:
    """Returns `value`, a list, as a tuple. `what` names its entries in the plural."""
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{where} must be a list of {what}, got {value!r}.")
    return tuple(value)


def instance(where: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Raises if `value` is not an instance of one of the classes. The error lists the concrete ones."""
    if not isinstance(value, kinds):
        names = list(dict.fromkeys(name for kind in kinds for name in _buildable(kind)))
        raise ConfigError(
            f"{where} must be a {', '.join(names)}, got {value!r}. Build one, for example trustrl.regions.{names[0]}()."
        )


def _buildable(kind: type) -> list[str]:
    """Returns the names of the concrete classes below a class: those without subclasses in this package."""
    # A dataclass with slots creates a second class of the same name. Only the one in its module counts.
    derived = [
        below
        for below in kind.__subclasses__()
        if below.__module__.startswith("trustrl.") and vars(sys.modules[below.__module__]).get(below.__name__) is below
    ]
    return [name for below in derived for name in _buildable(below)] or [kind.__name__]

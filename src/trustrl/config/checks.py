"""The rules settings are checked against, each with a sentence that says what to do."""

import math
from typing import Any

from trustrl.errors import ConfigError


def real(where: str, value: Any, *, rule: str, low: float, high: float = math.inf, advice: str = "") -> float:
    """`value` as a float in (low, high]; `rule` names the allowed range in words.

    Raises:
        ConfigError: `value` is no number, NaN, or outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
        raise ConfigError(f"{where} must be {rule}, got {value!r}.{' ' if advice else ''}{advice}")
    return float(value)


def non_negative(where: str, value: Any, *, advice: str = "") -> float:
    """`value` as a finite float that is 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"{where} must be a finite number ≥ 0, got {value!r}.{' ' if advice else ''}{advice}")
    return float(value)


def whole(where: str, value: Any, *, low: int, advice: str = "") -> int:
    """`value` as an int of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{where} must be a whole number ≥ {low}, got {value!r}.{' ' if advice else ''}{advice}")
    return value


def one_of(where: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuses a word that is not in `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{where} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")


def truth(where: str, value: Any) -> None:
    """Refuses what is neither true nor false: the text 'False' would count as true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, got {value!r}.")


def instance(where: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Refuses a setting object of another class than the ones allowed here."""
    if not isinstance(value, kinds):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigError(
            f"{where} must be a {names}, got {value!r}. Build one, for example trustrl.{kinds[0].__name__}()."
        )

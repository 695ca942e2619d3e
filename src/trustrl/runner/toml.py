"""TOML out (the standard library only reads it), and settings of the form `a.b=value` in."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trustrl.errors import ConfigError

BARE = re.compile(r"[A-Za-z0-9_-]+")
WORD = re.compile(r"[A-Za-z_.~/][\w.:/~+-]*")  # on a command line, such words need no quotes


def dumps(data: Mapping[str, Any]) -> str:
    """The text `tomllib.loads` reads back to equal data; None is left out, for TOML has none.

    Example:
        >>> print(dumps({"name": "tour", "region": {"preset": "troll"}}), end="")
        name = "tour"
        <BLANKLINE>
        [region]
        preset = "troll"
    """
    return "\n".join(_lines(data, ())).lstrip("\n") + "\n"


def _lines(data: Mapping[str, Any], at: tuple[str, ...]) -> Iterator[str]:
    plain = {key: value for key, value in data.items() if not isinstance(value, Mapping) and value is not None}
    if at and (plain or not data):
        yield f"\n[{'.'.join(map(_key, at))}]"
    yield from (f"{_key(key)} = {_value(value)}" for key, value in plain.items())
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _lines(value, (*at, key))


def _key(key: str) -> str:
    return key if BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)  # inf and nan are TOML's own words
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items() if v is not None)}}}"
        case _:
            raise ConfigError(f"A setting must be text, a number, true, false or a list of these, got {value!r}.")


def read_override(text: str) -> tuple[tuple[str, ...], Any]:
    """The place and the value of `a.b=value`. The value is TOML; a word needs no quotes.

    Raises:
        ConfigError: it is not of this form.

    Example:
        >>> read_override("region.divergence.max_increase=0.2"), read_override("region.preset=troll")
        ((('region', 'divergence', 'max_increase'), 0.2), (('region', 'preset'), 'troll'))
    """
    left, equals, right = text.partition("=")
    where = tuple(left.strip().split("."))
    if not equals or not all(where):
        raise ConfigError(f"A setting must be written <table>.<key>=<value>, got {text!r}, as in schedule.steps=50.")
    try:
        return where, tomllib.loads(f"x = {right}")["x"]
    except tomllib.TOMLDecodeError:
        if WORD.fullmatch(right):
            return where, right
        raise ConfigError(
            f"{left} must be a TOML value (a number, true, false, a list, text in quotes) or one word, got {right!r}."
        ) from None


def override(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`data` with settings replaced or added, in order.

    A region is chosen whole: `region.preset` and `region.kind` discard what the recipe's own region says.
    """
    merged: dict[str, Any] = _copied(data)
    for text in overrides:
        where, value = read_override(text)
        if where in (("region", "preset"), ("region", "kind")):
            merged["region"] = {}
        table = merged
        for at, name in enumerate(where[:-1]):
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{'.'.join(where[: at + 1])} must be a table to hold {text!r}, got {table!r}.")
        table[where[-1]] = value
    return merged


def _copied(data: Any) -> Any:
    return {key: _copied(value) for key, value in data.items()} if isinstance(data, Mapping) else data

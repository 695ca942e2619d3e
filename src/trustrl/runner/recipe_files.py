"""Recipe files: the shipped recipes by name, overrides of the form `a.b=value`, and writing TOML.

The recipe `tour` is `recipes/tour.toml` in a checkout, and is part of every wheel. Reading needs the standard library
alone. Writing needs tomli-w, which `pip install "trustrl[run]"` brings.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError, UnknownNameError
from trustrl.files import parsed_toml
from trustrl.optional_imports import need, shipped_folder
from trustrl.registry import nearest

SOURCES = ("files", "hub", "package")
SOURCE_KEYS = (*SOURCES, "subset", "held_out_split")
WORD = re.compile(r"[A-Za-z_.~/][\w.:/~+-]*")  # on a command line, such words need no quotes


def shipped() -> dict[str, Path]:
    """Returns the file of each shipped recipe, by name."""
    files = shipped_folder("recipes").glob("*.toml")
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


def named(name: str) -> Path:
    """Returns the file of a shipped recipe."""
    known = shipped()
    if name not in known:
        raise UnknownNameError(
            f"A recipe must be a file that ends with .toml, or a known name, got {name!r}."
            f"{nearest(name, list(known))} Known: {', '.join(known)}."
        )
    return known[name]


def file_of(recipe: str | Path) -> Path:
    """Returns the file of a recipe. A path contains a slash or ends with .toml; anything else is a name.

    Raises:
        UnknownNameError: If no shipped recipe has that name.
    """
    path = Path(recipe)
    is_path = path.suffix == ".toml" or path.name != str(recipe)
    return path if is_path else named(path.name)


def about(file: Path) -> str:
    """Returns the description of a recipe: the comment on its first line."""
    return file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def dumps(data: Mapping[str, Any]) -> str:
    """Returns TOML text that `tomllib.loads` reads back as equal data. Omits None, which TOML does not have.

    Raises:
        ConfigError: If a value has no TOML form.
        MissingPackageError: If tomli-w is not installed.
    """
    writer = need("tomli_w", extra="run")
    try:
        return writer.dumps(without_none(data))
    except TypeError as error:
        raise ConfigError(
            f"Every setting must be a string, a number, true, false, a list or a table, got: {error}."
        ) from None


def without_none(data: Any) -> Any:
    """Returns plain data without the entries that are None."""
    if isinstance(data, (list, tuple)):
        return list(map(without_none, data))
    if not isinstance(data, Mapping):
        return data
    return {key: without_none(value) for key, value in data.items() if value is not None}


def read_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Parses `a.b=value` into the path and the value. The value is TOML, but a single word needs no quotes.

    Example:
        >>> read_override("region.divergence.max_increase=0.2"), read_override("region.preset=troll")
        ((('region', 'divergence', 'max_increase'), 0.2), (('region', 'preset'), 'troll'))
    """
    left, equals, right = text.partition("=")
    where = tuple(left.strip().split("."))
    if not equals or not all(where):
        raise ConfigError(
            f"An override must have the form <table>.<key>=<value>, got {text!r}. Write for example schedule.steps=50."
        )
    try:
        return where, parsed_toml(f"x = {right}".encode("utf-8", "replace"))["x"]
    except ValueError:
        if WORD.fullmatch(right):
            return where, right
        raise ConfigError(
            f"{left} must be a TOML value (a number, true, false, a list, a quoted string) or a single word, "
            f"got {right!r}."
        ) from None


def override(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns `data` with settings replaced or added, in order.

    `region.preset` and `region.kind` replace the whole region: they discard the recipe's other region settings.
    `data.files`, `data.hub` and `data.package` discard the recipe's source of the data.
    """
    merged: dict[str, Any] = _copied(data)
    for text in overrides:
        where, value = read_override(text)
        if where in (("region", "preset"), ("region", "kind")):
            merged["region"] = {}
        if where[0] == "data" and where[-1] in SOURCES and isinstance(merged.get("data"), dict):
            merged["data"] = {name: value for name, value in merged["data"].items() if name not in SOURCE_KEYS}
        table = merged
        for depth, name in enumerate(where[:-1]):
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{'.'.join(where[: depth + 1])} must be a table to apply {text!r}, got {table!r}.")
        table[where[-1]] = value
    return merged


def extended(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe with another one laid over it, table by table. [region], [data] and [reward] replace the base's.

    Example:
        >>> extended({"name": "a", "schedule": {"steps": 8, "seed": 1}}, {"name": "b", "schedule": {"steps": 2}})
        {'name': 'b', 'schedule': {'steps': 2, 'seed': 1}}
    """
    merged: dict[str, Any] = _copied(base)
    if "data" in data:
        merged.pop("task", None)
    if "task" in data:
        merged = {name: table for name, table in merged.items() if name not in ("data", "reward")}
    for name, table in data.items():
        own: Any = merged.get(name)
        if isinstance(own, dict) and isinstance(table, Mapping) and name not in ("region", "data", "reward"):
            merged[name] = {**own, **table}
        else:
            merged[name] = table
    return merged


def _copied(data: Any) -> Any:
    return {key: _copied(value) for key, value in data.items()} if isinstance(data, Mapping) else data

"""Tables of docs/reference/recipe.md: every key of a recipe, from the fields of its tables and their docstrings.

python scripts/recipe_page.py    writes them between the markers of the page
"""

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from region_pages import documented

from trustrl.recording.recording_settings import Recording
from trustrl.regions.loading import config_to_dict
from trustrl.runner.evaluation_tables import EvaluationSet
from trustrl.runner.recipe import DATA_TABLES, RECORD_KEYS
from trustrl.runner.recipe_tables import TABLES

PAGE = Path(__file__).parents[1] / "docs/reference/recipe.md"
BEGIN, END = "<!-- begin keys -->", "<!-- end keys -->"
HEADER = "| key | default | meaning |\n|---|---|---|"


def default_of(setting: Field) -> str:
    """Returns the default as a value of TOML, "none" for a key that may be left out, and "–" for one that must not."""
    if setting.default_factory is not MISSING:
        return "`{}`"
    if setting.default is MISSING:
        return "–"
    return "none" if setting.default is None else f"`{json.dumps(setting.default)}`"  # a tuple is a list in TOML


def values_of(hint: object) -> str:
    """Returns the values of a Literal, or of one that may be None, as the end of a description."""
    choices = [hint, *get_args(hint)]
    names = [f'"{name}"' for choice in choices if get_origin(choice) is Literal for name in get_args(choice)]
    return f" Values: {', '.join(names)}." if names else ""


def rows(name: str, table: type) -> Iterator[str]:
    """Yields a row for each key of a table."""
    texts, hints = documented(table), get_type_hints(table)
    for setting in fields(table):
        key, text = f"{name}.{setting.name}", texts[setting.name].replace("|", "\\|")
        yield f"| `{key}` | {default_of(setting)} | {text}{values_of(hints[setting.name])} |"


def record_rows() -> Iterator[str]:
    """Yields a row for each key of [records]."""
    texts, values = documented(Recording), config_to_dict(Recording(folder="anywhere"))
    for key in RECORD_KEYS:
        yield f"| `records.{key}` | `{json.dumps(values[key])}` | {texts[key]} |"


def tables() -> str:
    """Returns one table for each table of a recipe, in the order in which a recipe has them."""
    every = TABLES | {"evaluation.sets": EvaluationSet}
    order = ["model", "task", *DATA_TABLES, *(name for name in TABLES if name not in ("model", "task", "logging"))]
    every |= DATA_TABLES
    parts = []
    for name in [*order, "evaluation.sets", "logging"]:
        about = " ".join(str(every[name].__doc__).split())
        _, _, meaning = about.partition("]: ") if "]]: " not in about else about.partition("]]: ")
        brackets = f"[[{name}]]" if name == "evaluation.sets" else f"[{name}]"
        parts.append(f"**`{brackets}`**: {meaning}\n\n{HEADER}\n" + "\n".join(rows(name, every[name])))
    about = "tokens to write down, as settings of a [recording](../guides/record.md)."
    parts.append(f"**`[records]`**: {about}\n\n{HEADER}\n" + "\n".join(record_rows()))
    return "\n\n".join(parts)


def page() -> str:
    """Returns the page with its tables written again."""
    text = PAGE.read_text(encoding="utf-8")
    new, found = re.subn(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{tables()}\n{END}", text, flags=re.S)
    if found != 1:
        raise SystemExit(f"{PAGE} must have one {BEGIN!r} followed by one {END!r}.")
    return new


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

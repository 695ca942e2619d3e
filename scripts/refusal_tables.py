"""docs/reference/refused-settings.md, written from the rows that the engines check.

python scripts/refusal_tables.py    writes the page
"""

import importlib
from collections.abc import Iterable
from pathlib import Path

from trustrl.engines.catalogue import ENGINES
from trustrl.engines.refusals.rows import Refusal

PAGE = Path(__file__).parents[1] / "docs/reference/refused-settings.md"
INTRODUCTION = """# Refused settings

<!-- Written by `python scripts/refusal_tables.py` from the rows that the adapters check -->

Use this page to find out why an engine's setting does not go with a region. The adapter raises the same error before
the first step, so you need not read the page first.
"""
MODULES = {"trl": "TRL", "verl": "verl", "skyrl": "SkyRL", "openrlhf": "OpenRLHF", "swift": "ms-swift",
           "axolotl": "axolotl", "nemo_rl": "NeMo RL", "slime": "slime"}  # fmt: skip
"""Modules with rows, and the names of their engines. miles is a fork of slime and checks its rows."""


def cells(row: Refusal) -> tuple[str, str, str, str]:
    """Returns a row of the table: the setting, the values that work, the regions, and the reason."""
    words = {"region": "the region"} | dict(row.words)
    setting, must_be, why = (text.format(**words) for text in (row.setting, row.must_be, row.why))
    if row.why.startswith("{"):
        why = why[:1].upper() + why[1:]
    return setting, must_be, row.scope.words, why


def table(rows: Iterable[Refusal]) -> str:
    """Returns the rows as a Markdown table. Settings that share all other cells are in one line."""
    settings: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        setting, *others = (cell.replace("|", "\\|") for cell in cells(row))
        settings.setdefault(tuple(others), []).append(f"`{setting}`")
    lines = [f"| {', '.join(names)} | {' | '.join(others)} |" for others, names in settings.items()]
    return "\n".join(["| setting | must be | for regions | why |", "|---|---|---|---|", *lines])


def rows(module: str) -> tuple[Refusal, ...]:
    """Returns the rows of an engine."""
    return importlib.import_module(f"trustrl.engines.refusals.{module}").ROWS


def page() -> str:
    """Returns the page."""
    pages = {engine.name: engine.page for engine in ENGINES}
    sections = [
        f"## {name}\n\n[Guide](../engines/{pages[name]}).\n\n{table(rows(module))}\n"
        for module, name in MODULES.items()
    ]
    return "\n".join([INTRODUCTION, *sections])


if __name__ == "__main__":
    PAGE.write_text(page())

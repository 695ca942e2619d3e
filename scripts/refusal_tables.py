"""docs/reference/refused-settings.md, written from the rows that the engines check.

python scripts/refusal_tables.py    writes the page
"""

import importlib
from pathlib import Path

from trustrl.engines.catalogue import ENGINES
from trustrl.engines.refusals.rows import Refusal, table

PAGE = Path(__file__).parents[1] / "docs/reference/refused-settings.md"
INTRODUCTION = """# Refused settings

<!-- Written by `python scripts/refusal_tables.py` from the rows that the adapters check -->

Use this page to find out why an engine's setting does not go with a region. The adapter raises the same error before
the first step, so you need not read the page first.
"""
MODULES = {"trl": "TRL", "verl": "verl", "skyrl": "SkyRL", "openrlhf": "OpenRLHF", "swift": "ms-swift",
           "axolotl": "axolotl", "nemo_rl": "NeMo RL", "slime": "slime"}  # fmt: skip
"""Modules with rows, and the names of their engines. miles is a fork of slime and checks its rows."""


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

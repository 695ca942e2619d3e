"""Tables of refused settings in docs/engines, written from the rows that the engines check.

python scripts/refusal_tables.py    writes them between the markers of each page
"""

import importlib
import importlib.util
from pathlib import Path

from trustrl.engines.refusals.rows import table

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/engines"
ENGINES = ("trl", "verl", "skyrl", "slime", "nemo-rl", "openrlhf", "axolotl", "swift")
BEGIN, END = "<!-- refused: begin (python scripts/refusal_tables.py) -->", "<!-- refused: end -->"


def rows(engine: str) -> tuple:
    """Returns the rows of an engine; none for one that does not declare them."""
    name = f"trustrl.engines.refusals.{engine.replace('-', '_')}"
    return importlib.import_module(name).ROWS if importlib.util.find_spec(name) else ()


def page(engine: str) -> str:
    """Returns the text of an engine's page with its table written again.

    Raises:
        SystemExit: the engine has rows and its page has no markers.
    """
    path = PAGES / f"{engine}.md"
    text, found = path.read_text(), rows(engine)
    if not found:
        return text
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{path} must contain {BEGIN!r} and {END!r}, where the table goes.")
    return f"{before}{BEGIN}\n{table(found)}\n{END}{after}"


def main() -> None:
    """Writes every page."""
    for engine in ENGINES:
        (PAGES / f"{engine}.md").write_text(page(engine))


if __name__ == "__main__":
    main()

"""Table of docs/reference/precision.md: a policy compared with itself, by engine, layout, precision and kind of region.

python scripts/precision.py rows/*.json    merges the rows that engines wrote into docs/data/precision.json first

A file may hold only some kinds of a layout. Rows of the other kinds stay as they were measured before, so a line of the
table, which has the largest numbers of a family, may join measurements of different days.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs/data/precision.json"
PAGE = ROOT / "docs/reference/precision.md"
BEGIN, END = "<!-- begin cells -->", "<!-- end cells -->"
FAMILIES = {
    "sampled token": ("Binary TV", "Binary KL", "PPO clip", "GSPO", "both anchors"),
    "Top-K, TROLL": ("Top-K TV", "Top-K KL", "TROLL"),
    "exact": ("exact TV", "exact KL"),
}
HEADER = (
    "engine", "layout", "precision", "regions", "TV", "KL", "&#124;log ratio&#124;", "masked", "bound",
    "arguments cast", "outputs cast",
)  # fmt: skip


def merged(rows: list[dict[str, Any]], files: list[str]) -> list[dict[str, Any]]:
    """Returns the rows, with those of the same engine, layout, precision and kind as a row in the files replaced."""
    fresh = {_cell(row): row for name in files for row in json.loads(Path(name).read_text())}
    cells = {_cell(row): row for row in rows} | fresh
    return sorted(cells.values(), key=_layout)


def _layout(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["engine"], row["layout"], row["precision"]


def _cell(row: dict[str, Any]) -> tuple[str, ...]:
    return *_layout(row), row["kind"]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns one line for each layout, precision and family of regions."""
    lines = [" | ".join(HEADER), " | ".join(["---"] * len(HEADER))]
    for layout in dict.fromkeys(map(_layout, rows)):
        for family, kinds in FAMILIES.items():
            cells = [row for row in rows if _layout(row) == layout and row["kind"] in kinds]
            if cells:
                lines.append(" | ".join((*layout, family, *_numbers(cells))))
    return "\n".join(f"| {line} |" for line in lines)


def _numbers(cells: list[dict[str, Any]]) -> tuple[str, ...]:
    numbers = [_number(max(cell[name] for cell in cells)) for name in ("tv", "kl", "log_ratio")]
    bounds = [cell["bound"] for cell in cells]
    bound = "none" if None in bounds else _number(max(bounds))
    faults = [_planted(cells, fault) for fault in ("arguments", "outputs")]
    return *numbers, str(sum(cell["masked"] for cell in cells)), bound, *faults


def _planted(cells: list[dict[str, Any]], fault: str) -> str:
    """Returns the largest difference with a fault put back, or a dash where the fault touches nothing."""
    touched = [cell["planted"][fault] for cell in cells if fault in cell["planted"]]
    if not touched:
        return "–"
    largest = max(max(x["tv"], x["log_ratio"]) for x in touched)
    what = _number(largest) if largest else "digits lost"
    verdicts = {x["caught"] for x in touched}
    return f"{what}, {'missed' if False in verdicts else 'no bound' if None in verdicts else 'caught'}"


def _number(x: float) -> str:
    return "0" if x == 0 else f"{x:.1e}" if x < 0.001 else f"{x:.4f}"


def page(text: str, rows: list[dict[str, Any]]) -> str:
    """Returns the page with its table written again."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}"


def main(files: list[str]) -> None:
    """Merges the files into the data, and writes the page."""
    rows = merged(json.loads(DATA.read_text()) if DATA.exists() else [], files)
    DATA.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n")
    PAGE.write_text(page(PAGE.read_text(), rows))


if __name__ == "__main__":
    main(sys.argv[1:])

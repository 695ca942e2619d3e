"""Figures docs/figures/vocabulary-*.png, drawn from the numbers that vocabulary.py stored.

Run `python benchmarks/vocabulary_figures.py`.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent.parent / "docs"
OWN, OTHER, INK = "#0b6e99", "#b5b5b5", "#222222"
LABEL = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
plt.rcParams.update(
    {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 130, "text.color": INK}
)


def short(name: str) -> str:
    name = name.replace("trustrl, ", "trustrl: ").replace(", sampled token and entropy", " (token, entropy)")
    return name.replace(", sampled token", " (token)")


def bars(ax, rows: list[tuple[str, float]], unit: str, digits: int) -> None:
    """Draws one labeled bar per path: trustrl's in a dark color, others light and hatched."""
    names = [short(name) for name, _ in rows]
    values = [value for _, value in rows]
    own = [name.startswith("trustrl") for name, _ in rows]
    drawn = ax.barh(range(len(rows)), values, color=[OWN if o else OTHER for o in own], height=0.7)
    for bar, is_own in zip(drawn, own, strict=True):
        bar.set_hatch("" if is_own else "///")
        bar.set_edgecolor("white")
    for at, value in enumerate(values):
        text = f"{value:.{digits}f}"
        ax.annotate(text, (value, at), (4, 0), textcoords="offset points", va="center", fontsize=8, bbox=LABEL)
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.set_xlim(0, max(values) * 1.12)


def time_figure(tables: list[dict]) -> None:
    skipped = ("no gradient", "TROLL", "sampled token only")
    sizes = [len(table["ratio"]) for table in tables]
    figure, axes = plt.subplots(
        len(tables), 1, figsize=(8.5, 1.4 + 0.3 * sum(sizes)), height_ratios=[n + 2 for n in sizes]
    )
    for ax, table in zip(axes, tables, strict=True):
        rows = [(n, v) for n, v in table["ratio"].items() if not any(f", {s}" in n for s in skipped)]
        bars(ax, rows, "time, three bare products = 1", 2)
        ax.axvline(1, color=INK, linewidth=1, linestyle="--")
        ax.set_title(f"{table['dtype']}, {table['rows']:,} tokens, {table['vocabulary']:,} words", fontsize=9)
    save(figure, "vocabulary-time.png")


def memory_figure(found: list[dict]) -> None:
    figure, ax = plt.subplots(figsize=(8.5, 4.2))
    rows = [(m["name"], m["bytes"] / 2**20) for m in found if m["dtype"] == "bf16" and m["rows"] == 1024]
    rows = [(n, v) for n, v in rows if not any(f", {s}" in n for s in ("no gradient", "TROLL", "sampled token only"))]
    bars(ax, rows, "peak MB above the inputs; the head's gradient alone is 297", 0)
    ax.axvline(297, color=INK, linewidth=1, linestyle="--")
    ax.set_title("bf16, 1,024 tokens, 151,936 words, hidden size 1,024", fontsize=9)
    save(figure, "vocabulary-memory.png")


def growth_figure(found: dict) -> None:
    figure, axes = plt.subplots(2, len(found["axes"]), figsize=(2.75 * len(found["axes"]), 5))
    for column, (axis, data) in enumerate(found["axes"].items()):
        values = data["values"]
        for row, (key, unit, scale) in enumerate(
            [("cpu_seconds", "CPU seconds per rank", 1.0), ("bytes_held", "peak MB per rank", 2.0**-20)]
        ):
            ax, fit = axes[row][column], data["fits"][key]
            ax.plot(values, [p[key] * scale for p in data["points"]], "o", color=OWN, label="measured")
            x = [values[0] + (values[-1] - values[0]) * i / 50 for i in range(51)]
            line = [(fit["intercept"] + fit["slope"] * (1 / v if axis == "ranks" else v)) * scale for v in x]
            ax.plot(x, line, "-", color=INK, linewidth=1, label=f"fit, R² = {fit['r2']:.3f}")
            ax.set_ylim(bottom=0)
            ax.set_xlabel({"ids": "given ids K"}.get(axis, axis))
            ax.xaxis.set_major_formatter(lambda v, _: f"{v / 1000:.0f}k" if v >= 10_000 else f"{v:,.0f}")
            ax.legend(fontsize=7, frameon=False, loc="best")
            if column == 0:
                ax.set_ylabel(unit)
    save(figure, "vocabulary-growth.png")


def save(figure, name: str) -> None:
    figure.tight_layout()
    (DOCS / "figures").mkdir(exist_ok=True)
    figure.savefig(DOCS / "figures" / name)
    plt.close(figure)


def main() -> None:
    numbers = json.loads((DOCS / "data" / "vocabulary.json").read_text())
    for part, draw in (("time", time_figure), ("memory", memory_figure), ("growth", growth_figure)):
        if part in numbers:
            draw(numbers[part])


if __name__ == "__main__":
    main()

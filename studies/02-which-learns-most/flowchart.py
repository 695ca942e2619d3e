"""Flowchart of docs/guides/choosing-a-region.md.

python studies/02-which-learns-most/flowchart.py
"""

from pathlib import Path

FILE = Path(__file__).parents[2] / "docs/figures/choosing.png"
QUESTION, ANSWER = "#e8f1f8", "#f3efe6"
BOXES = {
    "same": (0, 0, "One update on a rollout, and the sampler's\nlog-probs equal the trainer's?", QUESTION),
    "any": (1, 0, "All regions are the same algorithm.\nKeep the loss you have.", ANSWER),
    "noise": (0, 1, "Mean |log π' − log μ| above 0.1 nats?\n(bf16 on SmolLM2: 0.04)", QUESTION),
    "probe": (1, 1, "Find the cause first: trustrl probe.\nNo region repairs a wrong sampler.", ANSWER),
    "several": (0, 2, "At most 4 updates on a rollout?", QUESTION),
    "alike": (1, 2, "Any region on μ: we saw no difference.\nWatch trustrl/masked_share.", ANSWER),
    "bound": (0, 3, "Must you bound how far the\nwhole distribution moved?", QUESTION),
    "exact": (1, 3, "dppo-topk-tv with max_ratio=2, or troll.\nBinary TV does not measure it.", ANSWER),
    "topk": (0, 4, "Does your engine record\nthe sampler's top-K?", QUESTION),
    "center": (1, 4, "Compare ppo with dppo-topk-tv and\nscore-centering, weights capped at 2.", ANSWER),
    "ppo": (0, 5, "ppo. Tune its clip: 0.2/0.28, 0.5/0.7,\n0.8/1.12, each with 3 learning rates.", ANSWER),
}
ARROWS = (
    ("same", "any", "yes"), ("same", "noise", "no"), ("noise", "probe", "yes"), ("noise", "several", "no"),
    ("several", "alike", "yes"), ("several", "bound", "no"), ("bound", "exact", "yes"), ("bound", "topk", "no"),
    ("topk", "center", "yes"), ("topk", "ppo", "no"),
)  # fmt: skip
WIDTH, HEIGHT, ACROSS, DOWN = 4.2, 0.95, 5.4, 1.55


def draw() -> None:
    """Draws the boxes in rows and columns, and the arrows between them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    columns = 1 + max(column for column, *_ in BOXES.values())
    rows = 1 + max(row for _, row, *_ in BOXES.values())
    figure, axis = plt.subplots(figsize=(columns * ACROSS / 1.35, rows * DOWN / 1.3))
    for column, row, text, color in BOXES.values():
        x, y = column * ACROSS, -row * DOWN
        axis.add_patch(
            FancyBboxPatch((x, y), WIDTH, HEIGHT, boxstyle="round,pad=0.05", facecolor=color, edgecolor="#555555")
        )
        axis.text(x + WIDTH / 2, y + HEIGHT / 2, text, ha="center", va="center", fontsize=9)
    for start, end, label in ARROWS:
        (column, row, *_), (to_column, to_row, *_) = BOXES[start], BOXES[end]
        if row == to_row:
            height = -row * DOWN + HEIGHT / 2
            a, b = (column * ACROSS + WIDTH + 0.06, height), (to_column * ACROSS - 0.06, height)
            at = ((a[0] + b[0]) / 2, a[1] + 0.08)
        else:
            a, b = (
                (column * ACROSS + WIDTH / 2, -row * DOWN - 0.06),
                (column * ACROSS + WIDTH / 2, -to_row * DOWN + HEIGHT + 0.06),
            )
            at = (a[0] + 0.1, (a[1] + b[1]) / 2 - 0.05)
        axis.annotate("", b, a, arrowprops={"arrowstyle": "-|>", "color": "#333333"})
        axis.text(*at, label, ha="center" if row == to_row else "left", va="bottom", fontsize=8.5, color="#333333")
    axis.set_xlim(-0.2, (columns - 1) * ACROSS + WIDTH + 0.2)
    axis.set_ylim(-(rows - 1) * DOWN - 0.3, HEIGHT + 0.3)
    axis.axis("off")
    figure.tight_layout(pad=0.2)
    figure.savefig(FILE, dpi=130)


if __name__ == "__main__":
    draw()

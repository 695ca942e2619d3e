"""Figure for the README: the largest allowed increase of a sampled token's probability, and the tokens each rule masks.

    python studies/03-which-tokens-masked/why.py draw

The left panel shows the rule, the right panel the measurements of `smollm2_tokens.py`.
"""

import sys
from pathlib import Path

import numpy as np
from smollm2_clipping import BINS, REGIONS, after, in_bins
from smollm2_masks import share
from smollm2_tokens import UPDATES, load

import trustrl

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from pages import command

FIGURE = Path(__file__).parents[2] / "docs/figures/why.png"


def allowed_rise(mu: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the largest π − μ at which a rising token with probability μ keeps its gradient."""
    clip, mask = (trustrl.preset(name) for name in REGIONS)
    return {"ppo": clip.ratio.max_increase * mu, "dppo-binary-tv": np.full_like(mu, mask.divergence.max_increase)}


def draw() -> None:
    """Draws rule and measurement side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from trustrl.runner.figures import COLOURS

    figure, (rule, measured) = plt.subplots(1, 2, figsize=(10.4, 3.9))
    mu = np.geomspace(1e-5, 0.78, 2)  # above, a token reaches π = 1 before either masks it
    styles = dict(zip(REGIONS, zip(COLOURS, ("-", "--"), strict=False), strict=True))
    for name, rise in allowed_rise(mu).items():
        colour, line = styles[name]
        rule.loglog(mu, rise, line, color=colour, linewidth=2.2, label=REGIONS[name])
    rule.set_title("largest allowed increase of the sampled token's probability", fontsize=10, loc="left")
    rule.set_xlabel("μ: the sampler's probability of the token", fontsize=9)
    rule.set_ylabel("largest allowed π − μ", fontsize=9)
    rule.legend(frameon=False, fontsize=9, loc="lower right")

    d = after(load(), max(UPDATES))
    places, bins = np.arange(len(BINS)), in_bins(d)
    for i, name in enumerate(REGIONS):
        heights = [100 * (share(d[name], inside) or 0) for inside in bins]
        bars = measured.bar(
            places + (i - 0.5) * 0.4, heights, 0.38, color=COLOURS[i], hatch="/" * 3 * i, edgecolor="white"
        )
        measured.bar_label(bars, [f"{h:.0f}" if h else "0" for h in heights], fontsize=8, padding=1)
    measured.set_title(f"tokens each rule masks: SmolLM2, {max(UPDATES)} updates on a batch", fontsize=10, loc="left")
    measured.set_xticks(places, BINS, fontsize=9)
    measured.set_xlabel("μ", fontsize=9)
    measured.set_ylabel("masked tokens, %", fontsize=9)
    measured.margins(y=0.12)
    for axis in (rule, measured):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
        axis.set_axisbelow(True)
    figure.tight_layout(w_pad=3)
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    command(__doc__, draw=draw)

"""Tokens that Binary, Top-K and exact divergences mask on SmolLM2-135M after 1, 4 and 16 updates without a region.

    python studies/03-which-tokens-masked/smollm2_masks.py draw
    python studies/03-which-tokens-masked/smollm2_masks.py page

Both read the files that `smollm2_tokens.py` writes.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from smollm2_tokens import KS, RESULTS, UPDATES, load, setting, stopped

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from pages import command, fill

BOUNDS = {"tv": (0.15, 0.05, 0.02), "kl": (0.05, 0.01, 0.002)}  # the presets' bounds first


def compared(data: dict, update: int, kind: str, bound: float, name: str) -> dict:
    """Masks of one approximation and of the exact divergence, at one bound after some updates."""
    at = data["update"] == update
    d = {key: values[at] for key, values in data.items()}

    def mask(column: str) -> np.ndarray:
        return stopped(d[column], d["log_pi"] - d["log_mu"], d["advantage"], bound)

    exact, lower = mask(f"{kind}_exact"), mask(f"{kind}_{name}")
    out = {
        "tokens": int(at.sum()),
        "exact": int(exact.sum()),
        "lower": int(lower.sum()),
        "recall": share(lower, exact),
        "precision": share(exact, lower),
        "interval": functools.partial(over_sequences, d["sequence"], lower, exact),
    }
    if kind == "tv":  # the KLs have no upper end
        upper = mask(f"tv_{name}_upper") if name != "exact" else exact
        out |= {
            "upper": int(upper.sum()),
            "upper_recall": share(upper, exact),
            "upper_precision": share(exact, upper),
            "undecided": float(np.mean((d[f"tv_{name}"] <= bound) & (d[f"tv_{name}_upper"] > bound))),
        }
    return out


def share(inside: np.ndarray, of: np.ndarray) -> float | None:
    """Returns the share of one mask that lies in another; None if the mask is empty."""
    return float(np.mean(inside[of])) if of.any() else None


def over_sequences(sequence: np.ndarray, inside: np.ndarray, of: np.ndarray) -> tuple[float, float] | None:
    """Returns a 95% bootstrap interval of `share`. Resamples whole completions, because their tokens move together."""
    draws = np.random.default_rng(0).integers(0, sequence.max() + 1, (2000, sequence.max() + 1))
    hits, all_of = (np.bincount(sequence, x)[draws].sum(-1) for x in (inside & of, of))
    if not (all_of > 0).all():
        return None
    low, high = np.quantile(hits / all_of, [0.025, 0.975])
    return float(low), float(high)


def draw() -> None:
    """Draws recall against K, and the share of tokens that the interval of the TV leaves undecided."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from trustrl.runner.figures import COLOURS

    data = load()
    figure, axes = plt.subplots(2, 2, figsize=(7.6, 6.4), sharex=True, sharey=True)
    panels = {
        ("tv", "recall"): "TV: share of exact's stops found",
        ("kl", "recall"): "KL: share of exact's stops found",
        ("tv", "upper_precision"): "TV, upper end: share of its stops\nthat exact makes too",
        ("tv", "undecided"): "TV: tokens it cannot decide",
    }
    for axis, ((kind, figure_name), title) in zip(axes.flat, panels.items(), strict=True):
        for i, bound in enumerate(BOUNDS[kind]):
            names = ["binary", *KS]
            found = np.array([compared(data, max(UPDATES), kind, bound, str(n))[figure_name] for n in names], float)
            places = [0.5, *KS]
            axis.plot(places[1:], found[1:], "o-", color=COLOURS[i], markersize=3.5, label=f"bound {bound:g}")
            axis.plot(places[0], found[0], "s", color=COLOURS[i], markersize=5)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xscale("log", base=2)
        axis.set_xticks(
            [0.5, 1, 4, 20, 64, 256, 1024, 4096, 49152], ["Bin", "1", "4", "20", "64", "256", "1k", "4k", "V"]
        )
        axis.minorticks_off()
        axis.tick_params(labelsize=8)
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("share", fontsize=9)
    for axis in axes[1]:
        axis.set_xlabel("K (Bin: Binary)", fontsize=9)
    figure.tight_layout()
    figure.savefig(RESULTS / "figures/smollm2-masks.png", dpi=130)


def page() -> None:
    """Writes the marked blocks of d-masks.md and of its tables."""
    data, file, tables = load(), RESULTS / "d-masks.md", RESULTS / "d-masks-tables.md"
    fill(file, "verdict", verdict(data))
    fill(file, "setting", setting())
    fill(file, "spread", spread(data))
    for kind in BOUNDS:
        fill(tables, f"recall {kind}", recall_table(data, kind))
    fill(tables, "upper", upper_table(data))
    fill(tables, "undecided", undecided_table(data))


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def verdict(data: dict) -> str:
    """Returns the answer for the presets' bounds after the last update."""
    said = []
    for kind, bounds in BOUNDS.items():
        found = {name: compared(data, max(UPDATES), kind, bounds[0], str(name)) for name in ("binary", *KS)}
        enough = [k for k in KS if (found[k]["recall"] or 0) >= 0.95]
        binary, paper = found["binary"], found[20]
        said.append(
            f"For the {kind.upper()} at {bounds[0]:g} Binary finds {percent(binary['recall'])} of the "
            f"{binary['exact']} tokens that the exact divergence masks{between(binary)}, Top-K with the paper's K = 20 "
            f"{percent(paper['recall'])}{between(paper)}; 95% need "
            + (f"K = {enough[0]}." if enough else "more than the vocabulary.")
        )
    recalls = [compared(data, max(UPDATES), kind, x[0], "binary")["recall"] or 0 for kind, x in BOUNDS.items()]
    answer = "Yes" if min(recalls) >= 0.95 else "Partly" if max(recalls) >= 0.95 else "No"
    fewer = [
        f"{percent(one['recall'])} of {one['exact']} for the {kind.upper()}"
        for kind, bounds in BOUNDS.items()
        for one in [compared(data, 4, kind, bounds[0], "binary")]
    ]
    return (
        f"**{answer}**, on one seed. After {max(UPDATES)} updates: {' '.join(said)} After 4 updates Binary finds "
        f"{' and '.join(fewer)}. {precision(data)}"
    )


def precision(data: dict) -> str:
    """Returns whether the lower end ever masked a token that the exact divergence keeps."""
    found = [
        compared(data, update, kind, bound, str(name))["precision"]
        for kind, bounds in BOUNDS.items()
        for name in ("binary", *KS)
        for update in UPDATES
        for bound in bounds
    ]
    tried = [value for value in found if value is not None]
    assert min(tried) == 1.0, "a lower bound above the exact divergence"
    return f"None of them masks a token that the exact divergence keeps (precision 1 in {len(tried)} comparisons)."


def between(found: dict) -> str:
    interval = found["interval"]()
    return "" if interval is None else f" (95% interval {100 * interval[0]:.0f} to {100 * interval[1]:.0f})"


def spread(data: dict) -> str:
    """Returns a table of how far the policy moved."""
    lines = [
        "| updates | mean TV | median | 99% | mean KL | 99% | mean of PPO's \\|r − 1\\| |",
        "|---|---|---|---|---|---|---|",
    ]
    for update in UPDATES:
        at = data["update"] == update
        tv, kl = data["tv_exact"][at], data["kl_exact"][at]
        ratio = np.abs(np.expm1(data["log_pi"][at] - data["log_mu"][at]))
        cells = [tv.mean(), np.median(tv), np.quantile(tv, 0.99), kl.mean(), np.quantile(kl, 0.99), ratio.mean()]
        lines.append(f"| {update} | " + " | ".join(f"{x:.4f}" for x in cells) + " |")
    return "\n".join(lines)


SHOWN = ("binary", 1, 4, 16, 20, 64, 256, 1024, 4096, 49152)


def table(data: dict, kind: str, cell: Callable[[dict], str], head: str = "", first: Callable | None = None) -> str:
    """Returns a table with a row per update and bound. Its columns are `first`, Binary and each K."""
    names = [*([head] if head else []), "Binary", *(f"K = {k:,}" for k in SHOWN[1:])]
    lines = [f"| updates | bound | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for update in UPDATES:
        for bound in BOUNDS[kind]:
            found = [compared(data, update, kind, bound, str(name)) for name in SHOWN]
            cells = [*([first(found[0])] if first else []), *map(cell, found)]
            lines.append(f"| {update} | {bound:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def recall_table(data: dict, kind: str) -> str:
    """Returns recall at the lower end. Precision is always 1, which `verdict` checks."""
    stopped_by_exact = ("masked by exact", lambda c: f"{c['exact']} of {c['tokens']}")
    return table(data, kind, lambda c: percent(c["recall"]), *stopped_by_exact)


def upper_table(data: dict) -> str:
    """Returns precision at the TV's upper end, where recall is 1."""
    found = [
        compared(data, update, "tv", bound, str(name))
        for update in UPDATES
        for bound in BOUNDS["tv"]
        for name in SHOWN[:-1]
    ]
    assert all(c["upper_recall"] in (None, 1.0) for c in found)
    return table(data, "tv", lambda c: f"{percent(c['upper_precision'])} of {c['upper']}")


def undecided_table(data: dict) -> str:
    """Returns the share of all tokens whose bound lies inside the TV's interval."""
    return table(data, "tv", lambda c: percent(c["undecided"]))


if __name__ == "__main__":
    command(__doc__, draw=draw, page=page)

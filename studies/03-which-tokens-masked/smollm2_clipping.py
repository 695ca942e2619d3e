"""Tokens that PPO's clip and DPPO mask on SmolLM2-135M, by their probability and by name.

    python studies/03-which-tokens-masked/smollm2_clipping.py draw
    python studies/03-which-tokens-masked/smollm2_clipping.py page

Both read the files that `smollm2_tokens.py` writes.
"""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from smollm2_masks import percent, share
from smollm2_tokens import RESULTS, UPDATES, load, stopped

import trustrl

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from pages import command, fill

REGIONS = {"ppo": "PPO's clip (.2, .28)", "dppo-binary-tv": "DPPO, Binary TV .15"}
EDGES = (0.001, 0.01, 0.1, 0.5, 0.9)
BINS = ("< .001", ".001–.01", ".01–.1", ".1–.5", ".5–.9", "≥ .9")
RARE = 0.1
EXACT_BOUND = 0.15
LISTED = 10


def after(data: dict, update: int) -> dict:
    """Returns the tokens after some updates, and under each region's name True for the tokens it masks."""
    d = {name: values[data["update"] == update] for name, values in data.items()}
    rollout = trustrl.RolloutTokens(
        behavior_logp=torch.from_numpy(d["log_mu"]), advantage=torch.from_numpy(d["advantage"]),
        in_loss=torch.ones(len(d["log_mu"]), dtype=torch.bool),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=torch.from_numpy(d["log_pi"]))
    for name in REGIONS:
        out = trustrl.policy_loss(policy, rollout, trustrl.preset(name), reduction=trustrl.TokenSum())
        d[name] = ~out.decision.keep.numpy()
    d["exact"] = stopped(d["tv_exact"], d["log_pi"] - d["log_mu"], d["advantage"], EXACT_BOUND)
    d["mu"] = np.exp(d["log_mu"])
    return d


def in_bins(d: dict) -> list[np.ndarray]:
    """Returns the tokens in each bin of the sampler's probability."""
    which = np.searchsorted(EDGES, d["mu"], side="right")
    return [which == i for i in range(len(BINS))]


def draw() -> None:
    """Draws the masked share in each bin of probability, one panel for each number of updates."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from trustrl.runner.figures import COLOURS

    data = load()
    figure, axes = plt.subplots(len(UPDATES), 1, figsize=(7.2, 7.2), sharex=True)
    places = np.arange(len(BINS))
    for axis, update in zip(axes, UPDATES, strict=True):
        d = after(data, update)
        bins = in_bins(d)
        for i, (name, label) in enumerate(REGIONS.items()):
            heights = [100 * (share(d[name], inside) or 0) for inside in bins]
            bars = axis.bar(places + (i - 0.5) * 0.4, heights, 0.38, color=COLOURS[i], label=label)
            axis.bar_label(bars, [f"{h:.1f}" if h else "0" for h in heights], fontsize=7, padding=1)
        axis.set_title(f"after {update} update{'s' * (update > 1)}", fontsize=10, loc="left")
        axis.set_ylabel("stopped, %", fontsize=9)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
        axis.set_axisbelow(True)
    axes[0].legend(frameon=False, fontsize=9)
    counts = [int(inside.sum()) for inside in in_bins(after(data, UPDATES[0]))]
    axes[-1].set_xticks(places, [f"{name}\n{n} tokens" for name, n in zip(BINS, counts, strict=True)], fontsize=9)
    axes[-1].set_xlabel("μ: the sampler's probability of the token", fontsize=9)
    figure.tight_layout()
    figure.savefig(RESULTS / "figures/smollm2-clipping.png", dpi=130)


def page() -> None:
    """Writes the marked blocks of d-masks.md and of its tables."""
    data = load()
    found = {update: after(data, update) for update in UPDATES}
    file, tables = RESULTS / "d-masks.md", RESULTS / "d-masks-tables.md"
    fill(file, "clip verdict", verdict(found))
    fill(file, "shares", shares(found))
    fill(tables, "bins", bins_table(found))
    fill(file, "whole", whole_table(found))
    fill(tables, "words", words(found[max(UPDATES)]))


def verdict(found: dict) -> str:
    d = found[max(UPDATES)]
    base = float(np.mean(d["mu"] < RARE))
    ppo, dppo = (share(d["mu"] < RARE, d[name]) for name in REGIONS)
    if ppo is None or dppo is None:
        return f"**Undecided.** After {max(UPDATES)} updates one of the two regions masks nothing here."
    answer = "Yes" if ppo > base and dppo < base else "Partly" if ppo > dppo else "No"
    both = share(d["ppo"], d["dppo-binary-tv"])
    return (
        f"**{answer}.** After {max(UPDATES)} updates {percent(ppo)} of the tokens that PPO's clip masks had a "
        f"probability below {RARE} under the sampler, where {percent(base)} of all tokens do; of those that DPPO masks "
        f"it is {percent(dppo)}. PPO masks {percent(d['ppo'].mean())} of all tokens, DPPO "
        f"{percent(d['dppo-binary-tv'].mean())}; {percent(both)} of what DPPO masks PPO masks too."
    )


def shares(found: dict) -> str:
    lines = [
        "| updates | region | masked | share of all | of these μ < 0.1 | of these μ < 0.01 | "
        f"of these, exact TV > {EXACT_BOUND:g} masks too | of what exact TV > {EXACT_BOUND:g} masks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for update, d in found.items():
        for name in REGIONS:
            shown = [share(d["mu"] < bound, d[name]) for bound in (RARE, 0.01)]
            shown += [share(d["exact"], d[name]), share(d[name], d["exact"])]
            cells = " | ".join(map(percent, [float(d[name].mean()), *shown]))
            lines.append(f"| {update} | `{name}` | {d[name].sum()} | {cells} |")
    d = found[UPDATES[0]]
    rare = [percent(np.mean(d["mu"] < bound)) for bound in (RARE, 0.01)]
    return "\n".join([*lines, f"| – | all tokens | {len(d['mu'])} | 100% | {rare[0]} | {rare[1]} | – | – |"])


def bins_table(found: dict) -> str:
    lines = [f"| updates | region | {' | '.join('μ ' + name for name in BINS)} |", "|---|---|" + "---|" * len(BINS)]
    for update, d in found.items():
        for name in REGIONS:
            cells = [f"{d[name][inside].sum()} of {inside.sum()}" for inside in in_bins(d)]
            lines.append(f"| {update} | `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def moved(d: dict) -> dict[str, float]:
    """Returns the mean movement of whole distributions, and how well each statistic of a token ranks it.

    "all" and "rare" are mean exact TVs: of all tokens, and of those with μ < `RARE` that PPO masks. The others are
    Spearman's rank correlations with the exact TV.
    """
    exact = d["tv_exact"]
    statistics = {"ratio": abs(d["log_pi"] - d["log_mu"]), "binary": d["tv_binary"], "top-20": d["tv_20"]}
    ranks = {name: float(spearmanr(values, exact).statistic) for name, values in statistics.items()}
    return {"all": float(exact.mean()), "rare": float(exact[d["ppo"] & (d["mu"] < RARE)].mean()), **ranks}


def whole_table(found: dict) -> str:
    lines = [
        f"| updates | mean exact TV, all tokens | mean exact TV, μ < {RARE:g} and masked by PPO | rank correlation of "
        "\\|log π/μ\\| | of Binary TV | of Top-20 TV |",
        "|---|---|---|---|---|---|",
    ]
    for update, d in found.items():
        m = moved(d)
        ranks = " | ".join(f"{m[name]:.2f}" for name in ("ratio", "binary", "top-20"))
        lines.append(f"| {update} | {m['all']:.3f} | {m['rare']:.3f} | {ranks} |")
    return "\n".join(lines)


def words(d: dict) -> str:
    """Returns the tokens masked most often, with the counts of masked and sampled occurrences."""
    drawn, said = Counter(d["text"]), []
    lines = ["| region | masked most often, as “token” masked/drawn |", "|---|---|"]
    for name in REGIONS:
        every = Counter(d["text"][d[name]])
        most = sorted(every.items(), key=lambda item: (-item[1], item[0]))[:LISTED]
        cells = ", ".join(f"“{visible(text)}” {n}/{drawn[text]}" for text, n in most)
        lines.append(f"| `{name}` | {cells} |")
        listed = sum(n for _, n in most)
        said.append(
            f"The tokens listed for `{name}` are {listed} of its {every.total()} masked ones, which fall on "
            f"{len(every)} different tokens."
        )
    return "\n".join([*lines, "", *said])


def visible(text: str) -> str:
    """Returns a token's text for a table: ␣ is a space, ⏎ a new line."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    command(__doc__, draw=draw, page=page)

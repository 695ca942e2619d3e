r"""Tokens that PPO's clip masks, and those of them that DPPO would mask.

    trustrl compare recipes/evidence/stale.toml records.sample=1.0 --arms recipes/evidence/arms.toml \
        --regions ppo --seeds 5 --out RECORDED
    python studies/01-which-region-wins/clipping.py count RECORDED
    python studies/01-which-region-wins/clipping.py page

`count` writes docs/results/data/clipping.json. `page` writes the page and its figure from that file.
"""

import json
import sys
import tomllib
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch

from trustrl.recording import read
from trustrl.world.models.tiny import CHARACTERS, SPECIAL

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from pages import fill

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs/results/data/clipping.json", ROOT / "docs/results/first-study-tables.md"
FIGURE = ROOT / "docs/results/figures/h-clipping.png"
EDGES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
RARE = 0.1
MOST = 8


def counts(folder: Path, max_gap: float) -> dict:
    """Counts tokens, and those each region masks, by the sampler's probability, and the ids that PPO masks most."""
    records = read(folder / "records")
    behavior, policy, advantage = (records[name].double() for name in ("behavior_logp", "policy_logp", "advantage"))
    mu, gap = behavior.exp(), policy.exp() - behavior.exp()
    leaving = ((advantage > 0) & (gap > 0)) | ((advantage < 0) & (gap < 0))
    moves = advantage != 0  # the others have no gradient to mask
    stopped = {"ppo": ~records["kept"] & moves, "dppo-binary-tv": leaving & (gap.abs() > max_gap)}
    at = torch.bucketize(mu, torch.tensor(EDGES[1:-1], dtype=torch.float64), right=True)

    def by_bin(chosen: torch.Tensor) -> list[int]:
        return torch.bincount(at[chosen], minlength=len(EDGES) - 1).tolist()

    ids = Counter(records["token_id"][stopped["ppo"]].tolist()).most_common()
    return {
        "tokens": by_bin(moves),
        "stopped": {name: by_bin(one) for name, one in stopped.items()},
        "gap": {name: float(gap[one].abs().sum()) for name, one in stopped.items()},
        "gap_all": float(gap[moves].abs().sum()),
        "rare": {name: int((mu[one] < RARE).sum()) for name, one in {**stopped, "tokens": moves}.items()},
        "upward": {name: int((advantage[one] > 0).sum()) for name, one in stopped.items()},
        "ids": ids,
    }


def count(runs: Path) -> None:
    arms = tomllib.loads((ROOT / "recipes/evidence/arms.toml").read_text())
    max_gap = arms["dppo-binary-tv"]["divergence"]["max_increase"]
    folders = sorted(runs.glob("ppo/seed-*/records"))
    found = {folder.parent.name.removeprefix("seed-"): counts(folder.parent, max_gap) for folder in folders}
    about = {"edges": EDGES, "ppo": arms["ppo"], "max_gap": max_gap, "seeds": found}
    DATA.write_text(json.dumps(about, indent=1) + "\n")


def page() -> None:
    found = json.loads(DATA.read_text())
    seeds = list(found["seeds"].values())
    ppo, dppo, every = (_ranged([_rare(one, name) for one in seeds]) for name in ("ppo", "dppo-binary-tv", "tokens"))
    moved = _ranged([one["gap"]["ppo"] / one["gap_all"] for one in seeds])
    upward = _ranged([one["upward"]["ppo"] / sum(one["stopped"]["ppo"]) for one in seeds])
    fill(
        PAGE,
        "verdict h",
        f"Of the tokens that PPO's clip stopped, **{ppo}** had μ < {RARE:g}; of all tokens with an advantage {every} "
        f"have. Of those that DPPO Binary TV (δ = {found['max_gap']:g}) would have stopped of the same tokens, {dppo} "
        f"had. The tokens that PPO stopped held {moved} of all probability that moved, and {upward} of them had a "
        f"positive advantage. (Mean and range of {len(seeds)} seeds.)",
    )
    fill(PAGE, "table h", "\n".join([*_bins(found["edges"], seeds), "", *_ids(seeds)]))
    _draw(found["edges"], seeds)


def _rare(one: dict, name: str) -> float:
    of = one["tokens"] if name == "tokens" else one["stopped"][name]
    return one["rare"][name] / max(sum(of), 1)


def _ranged(values: list[float]) -> str:
    return f"{sum(values) / len(values):.1%} ({min(values):.1%} to {max(values):.1%})"


def _labels(edges: list[float]) -> list[str]:
    return [f"{low:g} to {high:g}" for low, high in pairwise(edges)]


def _bins(edges: list[float], seeds: list[dict]) -> list[str]:
    lines = ["| μ of the token | tokens | stopped by PPO | stopped by DPPO Binary TV |", "|---|---|---|---|"]
    for at, label in enumerate(_labels(edges)):
        total = sum(one["tokens"][at] for one in seeds)
        cells = []
        for name in ("ppo", "dppo-binary-tv"):
            stopped = sum(one["stopped"][name][at] for one in seeds)
            cells.append(f"{stopped:,} ({stopped / max(total, 1):.2%})")
        lines.append(f"| {label} | {total:,} | {cells[0]} | {cells[1]} |")
    return lines


def _ids(seeds: list[dict]) -> list[str]:
    words = [*SPECIAL, *CHARACTERS]
    total: Counter[int] = Counter()
    for one in seeds:
        total.update(dict(map(tuple, one["ids"])))
    stopped = sum(sum(one["stopped"]["ppo"]) for one in seeds)
    most = ", ".join(f"`{words[i]}` {n / stopped:.1%}" for i, n in total.most_common(MOST))
    return [f"The ids that PPO stopped most, as shares of all it stopped: {most}."]


def _draw(edges: list[float], seeds: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from trustrl.runner.figures import COLOURS

    labels = _labels(edges)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6))
    total = [sum(one["tokens"][at] for one in seeds) for at in range(len(labels))]
    for shift, (name, colour, hatch) in enumerate((("ppo", COLOURS[1], "//"), ("dppo-binary-tv", COLOURS[0], ""))):
        stopped = [sum(one["stopped"][name][at] for one in seeds) for at in range(len(labels))]
        places = [at + (shift - 0.5) * 0.4 for at in range(len(labels))]
        style = {"width": 0.38, "color": colour, "label": name, "hatch": hatch, "edgecolor": "white"}
        axes[0].bar(places, [s / max(t, 1) for s, t in zip(stopped, total, strict=True)], **style)
        axes[1].bar(places, [s / max(sum(stopped), 1) for s in stopped], **style)
    for axis, label in zip(axes, ("stopped share of the bin's tokens", "share of all stopped tokens"), strict=True):
        axis.set_ylabel(label)
        axis.set_xticks(range(len(labels)), labels, rotation=35, ha="right", fontsize=8)
        axis.set_xlabel("μ of the sampled token")
        axis.grid(alpha=0.25, axis="y")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.tight_layout()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=110)


if __name__ == "__main__":
    count(Path(sys.argv[2])) if sys.argv[1] == "count" else page()

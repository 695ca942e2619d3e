"""Tables, verdicts and figures of the proxy study, from its raw data.

    python studies/05-which-statistic/proxies.py draw
    python studies/05-which-statistic/proxies.py page

Both read the files that `proxy_run.py pack` writes.
"""

import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import proxy_theory
from proxy_data import KS, MODELS, UPDATES, about, batches
from proxy_stats import (
    BINS,
    COMPARED,
    NAMES,
    PRIMARY,
    RATES,
    at_rate,
    bystanders,
    correlations,
    every,
    flagged,
    in_bin,
    interval,
    outward,
    pooled,
    primary,
    tests,
    trained_first,
    within_entropy,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from pages import command, fill

RESULTS = Path(__file__).parents[2] / "docs/results"
SAMPLED = ("ratio", "log_r", "tv_binary", "kl_binary")
CONTROLS = ("surprise", "entropy")
SHOWN = (*SAMPLED, *(f"tv_{k}" for k in KS), *CONTROLS)
FEW = ("log_r", "tv_binary", "tv_20", "surprise")
ARMS = {"none": "none", "ppo": "`ppo`", "dppo": "`dppo-binary-tv`", "sgd": "none, SGD"}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a Markdown table."""
    head = list(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *map(list, rows)])


def cell(values: np.ndarray, digits: int = 2) -> str:
    """Returns a mean over batches with its interval."""
    mean, low, high = interval(values)
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def setting() -> str:
    """Returns the table of models, and a line on how the numbers were made."""
    rows = []
    for name in MODELS:
        one = about()[name]
        rate = f"{one['learning_rate']:g}" + (f", SGD {one['sgd_rate']:g}" if "sgd" in one["arms"] else "")
        loss = f"{one['held_out_loss']:.2f}" if "held_out_loss" in one else "–"
        cells = (f"{one['parameters'] / 1e6:.1f} million", f"{one['vocabulary']:,}", loss, rate)
        rows.append((f"`{name}`", *cells, str(one["batches"]), f"{one['tokens']:,}"))
    made = ", ".join(f"{name} {number}" for name, number in about()["versions"].items())
    worst = max(about()[name]["differs_from_library"] for name in MODELS)
    minutes = sum(about()[name]["minutes"] for name in MODELS)
    return (
        table(("model", "parameters", "ids", "held-out loss", "learning rate", "batches", "tokens"), rows)
        + f"\n\n{made}; {minutes:.0f} minutes of updates and divergences on one shared core. The study's "
        f"divergences differ from the library's by at most {worst:.0e}."
    )


def arms(name: str) -> list[str]:
    """Returns the arms that were measured, in the order of the tables."""
    return [arm for arm in ARMS if arm in about()[name]["arms"]]


def spread() -> str:
    """Returns a table of how far the policies moved."""
    rows = []
    for name in MODELS:
        for arm in arms(name):
            for update in UPDATES:
                d = pooled(name, arm, update)
                numbers = (d["tv_exact"].mean(), d["ratio"].mean() / 2, np.quantile(d["tv_exact"], 0.99))
                kls = (d["kl_exact"].mean(), np.median(d["tv_binary"] / d["tv_exact"]))
                count = str(len(batches(name, arm, update)))
                rows.append((f"`{name}`", ARMS[arm], count, str(update), *(f"{x:.4f}" for x in (*numbers, *kls))))
    head = ("model", "region", "batches", "updates", "mean TV", "mean of \\|r − 1\\|/2", "99% of TV", "mean KL")
    return table((*head, "median Binary TV ÷ TV"), rows)


def ranks() -> str:
    """Returns the first primary measure for every statistic."""
    rows = [(NAMES[s], *(cell(primary(name, "rank", s)) for name in MODELS)) for s in SHOWN]
    return table(("statistic", *(f"`{name}`" for name in MODELS)), rows)


TAIL = 0.01


def matched_rates() -> str:
    """Returns the second primary measure, recall and share of the sum, at 5%."""
    rows = []
    for s in (*SHOWN, "tv_exact"):
        found = [at_rate(name, "none", 4, s, PRIMARY) for name in MODELS]
        cells = [
            f"{cell(f['mean'], 3)} | {100 * f['recall'].mean():.0f}% | {100 * f['share'].mean():.0f}%" for f in found
        ]
        rows.append((NAMES[s], *cells))
    head = [f"`{name}`: mean TV of flagged | recall | share of TV" for name in MODELS]
    lines = table(("statistic", *" | ".join(head).split(" | ")), rows)
    means = ", ".join(f"{pooled(name, 'none', 4)['tv_exact'].mean():.3f} for `{name}`" for name in MODELS)
    return f"{lines}\n\nThe mean over all tokens is {means}."


def tested() -> str:
    """Returns the registered comparisons."""
    rows = []
    for (measure, name, first, second), one in tests().items():
        what = "Spearman" if measure == "rank" else "mean TV of flagged, 5%"
        gap = f"{one['mean']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]"
        verdict = "undecided" if one["holm"] >= 0.05 else NAMES[first] if one["mean"] > 0 else NAMES[second]
        ahead = f"{one['positive']} of {one['batches']}"
        rows.append((what, f"`{name}`", f"{NAMES[first]} − {NAMES[second]}", gap, ahead, p_value(one["holm"]), verdict))
    return table(("measure", "model", "difference", "mean [95%]", "batches > 0", "p, Holm", "ahead"), rows)


def p_value(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def by_rate() -> str:
    """Returns the multiple of the mean TV that flagged tokens have, for each matched rate."""
    rows = []
    for name in MODELS:
        for s in ("ratio", "log_r", "tv_binary", "kl_binary", "tv_1", "tv_20", "surprise", "tv_exact"):
            rows.append((f"`{name}`", NAMES[s], *(cell(at_rate(name, "none", 4, s, r)["lift"]) for r in RATES)))
    return table(("model", "statistic", *(f"{100 * r:.0f}%" for r in RATES)), rows)


def by_arm(among: Callable = every) -> str:
    """Returns both primary measures for each region and number of updates."""
    rows = []
    for name in MODELS:
        for arm in arms(name):
            for update in UPDATES:
                cells = [f"{correlations(name, arm, update, s, among=among).mean():.2f}" for s in FEW]
                lifts = [f"{at_rate(name, arm, update, s, PRIMARY, among)['lift'].mean():.2f}" for s in FEW]
                count = str(len(batches(name, arm, update)))
                rows.append((f"`{name}`", ARMS[arm], count, str(update), *cells, *lifts))
    head = [NAMES[s] for s in FEW]
    return table(
        ("model", "region", "batches", "updates", *(f"ρ {h}" for h in head), *(f"lift {h}" for h in head)), rows
    )


def by_probability() -> str:
    """Returns, for each bin of μ(a), the mean TV, the correlations, and the share of tokens that each flags at 5%."""
    rows = []
    for name in MODELS:
        d = pooled(name, "none", 4)
        chosen = {s: np.zeros(len(d["log_mu"]), bool) for s in FEW}
        at = 0
        for one in batches(name, "none", 4):
            for s in FEW:
                chosen[s][at + flagged(one, s, PRIMARY)] = True
            at += len(one["log_mu"])
        for low, high in pairwise(BINS):
            here = in_bin(low, high)(d)
            rho = [f"{pooled_rank(d, s, here):.2f}" for s in ("log_r", "tv_binary", "tv_20")]
            shares = [f"{100 * chosen[s][here].mean():.1f}%" for s in FEW]
            flagged_tv = [mean_or_dash(d["tv_exact"][here & chosen[s]]) for s in ("log_r", "tv_binary", "tv_20")]
            label = f"{low:g}–{high:g}"
            rows.append(
                (f"`{name}`", label, str(here.sum()), f"{d['tv_exact'][here].mean():.4f}", *rho, *shares, *flagged_tv)
            )
    head = ["model", "μ(a)", "tokens", "mean TV", "ρ \\|log r\\|", "ρ Binary TV", "ρ Top-20 TV"]
    head += [f"flagged by {NAMES[s]}" for s in FEW]
    head += [f"their mean TV, {NAMES[s]}" for s in ("log_r", "tv_binary", "tv_20")]
    return table(head, rows)


def mean_or_dash(values: np.ndarray) -> str:
    return f"{values.mean():.3f}" if len(values) else "–"


def pooled_rank(d: dict[str, np.ndarray], statistic: str, at: np.ndarray) -> float:
    """Returns Spearman's correlation with the exact TV over some tokens of all batches."""
    from scipy.stats import spearmanr

    return float(spearmanr(d[statistic][at], d["tv_exact"][at]).statistic)


def own_gradient() -> str:
    """Returns correlations after one update, apart for tokens that had a gradient and for the others."""
    rows = []
    for name in MODELS:
        for arm in ("none", "sgd"):
            if arm not in arms(name):
                continue
            for label, among in (("trained", trained_first), ("others", bystanders)):
                kept = [{key: values[among(one)] for key, values in one.items()} for one in batches(name, arm, 1)]
                tv = np.array([one["tv_exact"].mean() for one in kept])
                ratio = np.array([one["ratio"].mean() / 2 for one in kept])
                share = np.array([np.median(one["tv_binary"] / one["tv_exact"]) for one in kept])
                cells = [cell(correlations(name, arm, 1, s, among=among)) for s in FEW]
                mean = (f"{tv.mean():.4f}", cell(ratio / tv), cell(share))
                rows.append((f"`{name}`", ARMS[arm], label, *mean, *cells))
    head = ("model", "region", "tokens", "mean TV", "mean of \\|r − 1\\|/2 ÷ mean TV", "median Binary TV ÷ TV")
    return table((*head, *(f"ρ {NAMES[s]}" for s in FEW)), rows)


def entropy_held() -> str:
    """Returns correlations within fifths of the sampler's entropy."""
    shown = ("ratio", "log_r", "tv_binary", "kl_binary", "tv_1", "tv_20", "surprise")
    rows = [(NAMES[s], *(cell(within_entropy(name, "none", 4, s)) for name in MODELS)) for s in shown]
    return table(("statistic", *(f"`{name}`" for name in MODELS)), rows)


def kl_target() -> str:
    """Returns both primary measures with the exact KL as target."""
    rows = []
    for s in (*SAMPLED, "kl_1", "kl_4", "kl_20", "kl_64", "kl_256", "kl_1024", *CONTROLS):
        rank = [cell(correlations(name, "none", 4, s, "kl_exact")) for name in MODELS]
        lift = [f"{at_rate(name, 'none', 4, s, PRIMARY, every, 'kl_exact')['lift'].mean():.2f}" for name in MODELS]
        rows.append((NAMES[s], *rank, *lift))
    names = [f"`{name}`" for name in MODELS]
    return table(("statistic", *(f"ρ {n}" for n in names), *(f"lift {n}" for n in names)), rows)


def sign(measure: str, name: str, first: str, second: str) -> int:
    """Returns 1 or -1 if the first or second statistic is ahead after Holm's correction, 0 if undecided."""
    one = tests()[measure, name, first, second]
    return 0 if one["holm"] >= 0.05 else 1 if one["mean"] > 0 else -1


def verdict() -> str:
    """Returns the answers to the two primary questions. Raises if the headline no longer holds."""
    signs = {
        (measure, *pair): [sign(measure, name, *pair) for name in MODELS]
        for measure in ("rank", "mean")
        for pair in COMPARED
    }
    at_5 = signs["mean", "log_r", "tv_binary"]
    assert {
        *signs["rank", "tv_20", "log_r"],
        *signs["mean", "tv_20", "log_r"],
        *signs["rank", "log_r", "tv_binary"],
    } == {1}
    assert at_5.count(-1) == 0
    said = [
        "**Top-K does. Of the statistics that read only the sampled token, |log r| ranks positions better than Binary "
        f"TV on {len(MODELS)} of {len(MODELS)} models. At a matched rate of 5%, |log r| is ahead on {at_5.count(1)}, "
        f"and the difference is undecided on {at_5.count(0)}.**\n"
    ]
    for measure, digits, text in (
        ("rank", 2, "Spearman's correlation with the exact TV"),
        ("mean", 3, "Mean exact TV of the 5% of tokens that each flags"),
    ):
        parts = []
        for name in MODELS:
            numbers = [f"{primary(name, measure, s).mean():.{digits}f}" for s in FEW]
            parts.append(f"{numbers[0]}, {numbers[1]}, {numbers[2]} and {numbers[3]} on `{name}`")
        said.append(f"- {text}, for |log r|, Binary TV, Top-20 TV and −log μ(a): {'; '.join(parts)}.")
    lifts = [[at_rate(name, "none", 4, s, TAIL)["lift"].mean() for name in MODELS] for s in FEW[:2]]
    ahead = sum(binary > log_r for log_r, binary in zip(*lifts, strict=True))
    said.append(
        f"- In the tail, where a mask acts: the {100 * TAIL:.0f}% of tokens that Binary TV flags have a higher mean "
        f"exact TV than those of |log r| on {ahead} of {len(MODELS)} models (not tested): "
        + "; ".join(f"{b:.2f} against {r:.2f} times the mean on `{n}`" for r, b, n in zip(*lifts, MODELS, strict=True))
        + "."
    )
    said.append(f"- {len(tests())} comparisons, with Holm's correction: [all](k-proxies-tables.md#tests).")
    return "\n".join(said)


PROTOCOL = ("spread", "arms", "outward", "kl", "theory")
"""Blocks that the page of the protocol has."""

MAIN = ("verdict", "setting", "ranks")
"""Blocks of the study's page. The others are in its tables."""


def page() -> None:
    """Writes the marked blocks of k-proxies.md and of its appendices."""
    blocks = {
        "verdict": verdict, "setting": setting, "spread": spread, "ranks": ranks, "matched": matched_rates,
        "tests": tested, "rates": by_rate, "arms": by_arm, "outward": lambda: by_arm(outward),
        "probability": by_probability, "own": own_gradient, "entropy": entropy_held, "kl": kl_target,
        "theory": proxy_theory.table,
    }  # fmt: skip
    for name, make in blocks.items():
        place = "k-protocol" if name in PROTOCOL else "k-proxies" if name in MAIN else "k-proxies-tables"
        fill(RESULTS / f"{place}.md", name, make())


def draw() -> None:
    """Draws the figures of k-proxies.md."""
    import proxy_figures

    proxy_figures.draw(RESULTS / "figures")


if __name__ == "__main__":
    command(__doc__, draw=draw, page=page)

"""Statistics of the proxy study: rank correlations, matched rates, intervals and tests over batches."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from proxy_data import KS, MINI_BATCHES, MODELS, batches
from scipy.stats import bootstrap, spearmanr, wilcoxon

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from holm import holm

RATES = (0.01, 0.02, 0.05, 0.10)
PRIMARY = 0.05
NAMES = {
    "ratio": "\\|r − 1\\|",
    "log_r": "\\|log r\\|",
    "tv_binary": "Binary TV",
    "kl_binary": "Binary KL",
    **{f"tv_{k}": f"Top-{k} TV" for k in KS},
    **{f"kl_{k}": f"Top-{k} KL" for k in KS},
    "surprise": "−log μ(a)",
    "entropy": "entropy of μ",
    "tv_exact": "exact TV",
    "kl_exact": "exact KL",
}
COMPARED = (("log_r", "tv_binary"), ("tv_20", "log_r"), ("log_r", "surprise"), ("tv_binary", "surprise"))
Batch = dict[str, np.ndarray]


def every(one: Batch) -> np.ndarray:
    """Selects all tokens."""
    return np.ones(len(one["log_mu"]), bool)


def outward(one: Batch) -> np.ndarray:
    """Selects the tokens that the advantage pushes further from the sampler. Regions mask only these."""
    return one["advantage"] * one["log_ratio"] > 0


def trained_first(one: Batch) -> np.ndarray:
    """Selects the tokens of the first mini-batch: after one update, those that had a gradient."""
    return one["sequence"] % MINI_BATCHES == 0


def bystanders(one: Batch) -> np.ndarray:
    """Selects the other tokens: after one update, they moved because others were trained."""
    return ~trained_first(one)


def rank_correlation(one: Batch, statistic: str, target: str = "tv_exact", among: Callable = every) -> float:
    """Returns Spearman's correlation of a statistic with the target over the tokens of a batch."""
    at = among(one)
    return float(spearmanr(one[statistic][at], one[target][at]).statistic)


def flagged(one: Batch, statistic: str, rate: float, among: Callable = every) -> np.ndarray:
    """Returns the indices of the share `rate` of the selected tokens with the largest values, at least one."""
    at = np.flatnonzero(among(one))
    count = max(1, round(rate * len(at)))
    return at[np.argsort(-one[statistic][at], kind="stable")[:count]]


def matched(
    one: Batch, statistic: str, rate: float, target: str = "tv_exact", among: Callable = every
) -> dict[str, float]:
    """Returns mean target of flagged tokens, its multiple of the mean, recall of the largest, and share of the sum."""
    at, values = flagged(one, statistic, rate, among), one[target]
    largest, all_values = flagged(one, target, rate, among), values[among(one)]
    return {
        "mean": float(values[at].mean()),
        "lift": float(values[at].mean() / all_values.mean()),
        "recall": float(np.isin(largest, at).mean()),
        "share": float(values[at].sum() / all_values.sum()),
        "rare": float((one["log_mu"][at] < np.log(0.1)).mean()),
    }


@cache
def correlations(
    name: str, arm: str, update: int, statistic: str, target: str = "tv_exact", among: Callable = every
) -> np.ndarray:
    """Returns the rank correlation in each batch."""
    return np.array([rank_correlation(one, statistic, target, among) for one in batches(name, arm, update)])


@cache
def at_rate(
    name: str, arm: str, update: int, statistic: str, rate: float, among: Callable = every, target: str = "tv_exact"
) -> dict[str, np.ndarray]:
    """Returns each measure at a matched rate, batch by batch."""
    found = [matched(one, statistic, rate, target, among) for one in batches(name, arm, update)]
    return {key: np.array([one[key] for one in found]) for key in found[0]}


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Returns the mean over batches and its 95% bootstrap interval (percentiles, 5,000 draws of batches)."""
    values = values[np.isfinite(values)]
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0]), float(values[0])
    found = bootstrap((values,), np.mean, n_resamples=5000, method="percentile", rng=np.random.default_rng(0))
    return float(values.mean()), float(found.confidence_interval.low), float(found.confidence_interval.high)


def primary(name: str, measure: str, statistic: str) -> np.ndarray:
    """Returns a primary measure in each batch: after 4 updates without a region."""
    if measure == "rank":
        return correlations(name, "none", 4, statistic)
    return at_rate(name, "none", 4, statistic, PRIMARY)["mean"]


@cache
def tests() -> dict[tuple[str, str, str, str], dict[str, float]]:
    """Returns the registered comparisons: mean difference, interval, Wilcoxon's p, and p after Holm's correction."""
    found = {}
    for measure in ("rank", "mean"):
        for name in MODELS:
            for first, second in COMPARED:
                gap = primary(name, measure, first) - primary(name, measure, second)
                mean, low, high = interval(gap)
                found[measure, name, first, second] = {
                    "mean": mean, "low": low, "high": high, "p": float(wilcoxon(gap).pvalue),
                    "positive": int((gap > 0).sum()), "batches": len(gap),
                }  # fmt: skip
    for one, adjusted in zip(found.values(), holm([one["p"] for one in found.values()]), strict=True):
        one["holm"] = adjusted
    return found


BINS = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)


def in_bin(low: float, high: float) -> Callable[[Batch], np.ndarray]:
    """Returns a selection of tokens by the sampler's probability: low ≤ μ(a) < high, and μ = 1 in the last bin."""

    def select(one: Batch) -> np.ndarray:
        mu = np.exp(one["log_mu"])
        return (mu >= low) & ((mu < high) | (high == 1.0))

    return select


def pooled(name: str, arm: str, update: int) -> Batch:
    """Returns the tokens of all batches as one."""
    found = batches(name, arm, update)
    return {key: np.concatenate([one[key] for one in found]) for key in found[0]}


def within_entropy(name: str, arm: str, update: int, statistic: str) -> np.ndarray:
    """Returns the mean rank correlation within fifths of the sampler's entropy, batch by batch."""
    found = []
    for one in batches(name, arm, update):
        edges = np.quantile(one["entropy"], np.linspace(0, 1, 6)[1:-1])
        fifth = np.searchsorted(edges, one["entropy"])
        parts = [rank_correlation(one, statistic, among=lambda o, i=i, f=fifth: f == i) for i in range(5)]
        found.append(np.mean(parts))
    return np.array(found)

"""Simple model of an update in which the correlations of the proxy study can be computed.

The sampler's distribution μ is Zipf's law over V ids, sharpened at each position by a random exponent. The update
changes the logits by a push c·A on the sampled token a and by noise σ·ε on every id:

    log π = log μ + c·A·[id = a] + σ·ε − log Z,   A = ±1,   ε ~ N(0, 1),   log σ ~ N(log s, τ²) per position

With σ = 0, all of the change is a consequence of a's own change and the TV is |π(a) − μ(a)|: Binary TV is exact. With
c = 0, all ids move alike, and log r(a) = σ·ε(a) − log Z is one draw of the noise whose size sets the TV.
"""

from functools import cache

import numpy as np
from scipy.stats import spearmanr

V, POSITIONS, SIZE, SPREAD = 5000, 2000, 0.05, 0.5
PUSHES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
"""Push on the sampled token in units of the typical noise, c/s."""


@cache
def simulated(push: float | None, spread: float = SPREAD) -> dict[str, float]:
    """Returns Spearman correlations with the exact TV. `push` None means a push of size s without noise."""
    rng = np.random.default_rng(0)
    base = -np.log(np.arange(1, V + 1))
    found: dict[str, list[float]] = {"tv": [], "log_r": [], "tv_binary": [], "surprise": [], "share": []}
    for _ in range(POSITIONS):
        logits = base * rng.uniform(0.7, 3.0)
        mu = np.exp(logits - logits.max())
        mu /= mu.sum()
        a = rng.choice(V, p=mu)
        size = SIZE * np.exp(spread * rng.standard_normal())
        noise = size * rng.standard_normal(V)
        change = np.zeros(V) if push is None else noise
        change[a] += rng.choice((-1, 1)) * (size if push is None else push * SIZE)
        pi = mu * np.exp(change)
        pi /= pi.sum()
        tv = np.abs(pi - mu).sum() / 2
        binary = abs(pi[a] - mu[a])
        for key, value in (
            ("tv", tv), ("log_r", abs(np.log(pi[a] / mu[a]))), ("tv_binary", binary), ("surprise", -np.log(mu[a])),
            ("share", binary / tv),
        ):  # fmt: skip
            found[key].append(value)
    out = {key: float(spearmanr(found[key], found["tv"]).statistic) for key in ("log_r", "tv_binary", "surprise")}
    return out | {"share": float(np.median(found["share"]))}


def table() -> str:
    """Returns the correlations for each strength of the push."""
    lines = [
        "| push c/s | \\|log r\\| | Binary TV | −log μ(a) | median Binary TV ÷ exact TV |",
        "|---|---|---|---|---|",
    ]
    for push in (*PUSHES, None):
        one = simulated(push)
        cells = " | ".join(f"{one[key]:.2f}" for key in ("log_r", "tv_binary", "surprise", "share"))
        lines.append(f"| {'no noise' if push is None else f'{push:g}'} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

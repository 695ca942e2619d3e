"""DPPO's improvement bound on models small enough to enumerate every sequence, in float64 without sampling.

    python studies/08-bound-holds/bound_pairs.py [--pairs 1000] [--seed 0]

Draws pairs of policies (μ, π) from near to far, over every prefix of every sequence, and compares the exact
J(π) − J(μ) with L′ minus the penalty. It imports numpy alone, so that tests can compare the tool with it.

Shapes:   T tokens, V words; with `ends`, word 0 ends the sequence and both policies repeat it from then on
Pairs:    `everywhere` moves every state by a random amount; `branch` moves the first state, and the states after one
          of its words; `cut` also takes the least likely word of every state from μ, as top-k does
Rewards:  `uniform` in [−1, 1], `binary` in {0, 1}, and `worst`: ±1 such that the error Δ is as large as it can be

Derivation of the bound: π(y) − μ(y) = Σ_t μ(y)(r_t − 1) Π_{j>t} r_j telescopes. Replacing the product by 1 gives L′,
and the remainder is −Δ. With y_{>t} from μ, E|1 − Π_{j>t} r_j| is twice the TV of what follows,
F_t ≤ min(1, (T−t)·D_max). Since E_μ|r_t − 1| = 2·TV_t,

    |Δ| ≤ ξ Σ_t E_μ[ |r_t − 1| · 2F_t ]
    F_t ≤ (T−t)·D_max:   |Δ| ≤ 2ξT(T−1)·D²_max
    F_t ≤ 1:             |Δ| ≤ 4ξ·D_sum

If π leaves μ's support with mass u_t, the sum form still holds: E_μ|r_t − 1| is 2·TV_t − u_t, and
4ξ(TV_t − u_t/2) + ξu_t ≤ 4ξTV_t.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SHAPES = ((3, 4), (3, 6), (4, 3), (5, 2), (6, 2))
MOVES = ("everywhere", "branch")
"""Moves that the theorem covers. It does not cover `cut`, where μ is 0 and π is not."""

REWARDS = ("uniform", "binary", "worst")
FACTOR = 0.1
"""Factor on the penalty in the first control."""


class Pairs(NamedTuple):
    """Policies over every prefix: entry t is (N, V^t, V), the distributions of word t after each prefix."""

    behavior: list[Array]
    policy: list[Array]


class Exact(NamedTuple):
    """Numbers of each pair, all (N,)."""

    change: Array
    """J(π) − J(μ)."""

    surrogate: Array
    error: Array
    """Δ, summed over sequences from its own definition."""

    max_tv: Array
    sum_tv: Array
    """E_μ Σ_t TV_t."""

    max_kl: Array
    """The largest KL(π‖μ) of all states."""

    xi: Array
    half_range: Array


def draw(rng: np.random.Generator, num: int, horizon: int, words: int, *, move: str, ends: bool) -> Pairs:
    """Draws pairs whose distance varies from 1e-4 to 5 in logits."""
    sharpness, far = 10 ** rng.uniform(-0.5, 0.5, num), 10 ** rng.uniform(-4.0, 0.7, num)
    behavior, policy = [], []
    ended = np.zeros(1, dtype=bool)
    for t in range(horizon):
        logits = sharpness[:, None, None] * rng.normal(size=(num, words**t, words))
        step = far[:, None, None] * rng.normal(size=logits.shape)
        if move == "branch":
            if t == 0:
                step[..., :-1] = 0.0
                step[..., -1] = -np.abs(step[..., -1])
            else:
                step[:, np.arange(words**t) // words ** (t - 1) != words - 1] = 0.0
        for found, x in ((behavior, logits), (policy, logits + step)):
            p = np.exp(x - x.max(-1, keepdims=True))
            if move == "cut" and found is behavior:
                np.put_along_axis(p, p.argmin(-1, keepdims=True), 0.0, -1)
            p /= p.sum(-1, keepdims=True)
            p[:, ended] = np.eye(words)[0]
            found.append(p)
        ended = np.repeat(ended, words) | (ends & (np.tile(np.arange(words), words**t) == 0))
    return Pairs(behavior, policy)


def _after(values: Array, step: Array) -> Array:
    """Repeats the value of each prefix for each word that may follow, and multiplies it by the step."""
    return (values[..., None] * step).reshape(len(values), -1)


def sequences_of(pairs: Pairs) -> tuple[Array, Array, list[Array]]:
    """Returns μ(y), π(y), and r_t at each t, for every sequence y."""
    num, horizon = len(pairs.behavior[0]), len(pairs.behavior)
    mu, pi, ratios = np.ones((num, 1)), np.ones((num, 1)), []
    for t, (p, q) in enumerate(zip(*pairs, strict=True)):
        mu, pi = _after(mu, p), _after(pi, q)
        ratio = np.divide(q, p, out=np.ones_like(q), where=p > 0).reshape(num, -1)
        ratios.append(np.repeat(ratio, p.shape[-1] ** (horizon - t - 1), axis=1))
    return mu, pi, ratios


def rewards_of(pairs: Pairs, rng: np.random.Generator, kind: str) -> Array:
    """Returns the reward of every sequence."""
    mu, pi, ratios = sequences_of(pairs)
    if kind == "worst":
        return np.where(mu * sum(ratio - 1 for ratio in ratios) - (pi - mu) >= 0, 1.0, -1.0)
    if kind == "binary":
        reward = (rng.uniform(size=mu.shape) < rng.uniform(0.05, 0.95, (len(mu), 1))).astype(float)
        reward[:, 0], reward[:, -1] = 0.0, 1.0
        return reward
    return rng.uniform(-1.0, 1.0, mu.shape)


def kl_of(q: Array, p: Array) -> Array:
    """Returns KL(q‖p) of each state, from terms that are never negative, so that near states do not cancel."""
    both = (p > 0) & (q > 0)
    logs = np.log1p(np.divide(q - p, p, out=np.where(q > p, np.inf, 0.0), where=both))
    return np.where(q > 0, q * logs - (q - p), p).sum(-1)


def measured(pairs: Pairs, reward: Array) -> Exact:
    """Enumerates all sequences and states of the pairs."""
    mu, pi, ratios = sequences_of(pairs)
    gap = sum(ratio - 1 for ratio in ratios)
    later, error = np.ones_like(mu), np.zeros(len(mu))
    for ratio in reversed(ratios):
        error += (mu * reward * (ratio - 1) * (1 - later)).sum(1)
        later = later * ratio
    state, max_tv, max_kl, sum_tv = np.ones((len(mu), 1)), *(np.zeros(len(mu)) for _ in range(3))
    for p, q in zip(*pairs, strict=True):
        tv = np.abs(p - q).sum(-1) / 2
        max_tv, max_kl = np.maximum(max_tv, tv.max(1)), np.maximum(max_kl, kl_of(q, p).max(1))
        sum_tv += (state * tv).sum(1)
        state = _after(state, p)
    return Exact(
        change=((pi - mu) * reward).sum(1), surrogate=(mu * reward * gap).sum(1), error=error,
        max_tv=max_tv, sum_tv=sum_tv, max_kl=max_kl, xi=np.abs(reward).max(1), half_range=np.ptp(reward, axis=1) / 2,
    )  # fmt: skip


def penalties(found: Exact, horizon: int, xi: Array) -> tuple[Array, Array]:
    """Returns 2ξT(T−1)·D²_max and 4ξ·D_sum, from the derivation and not from the tool."""
    return 4 * xi * sum(horizon - t for t in range(1, horizon + 1)) * found.max_tv**2, 4 * xi * found.sum_tv


def count(horizon: int, found: Exact, exchanged: Exact) -> dict[str, int]:
    """Counts the pairs that violate the bound, those where it is positive, and those that violate a control.

    `control: exchanged` reads the bound of the exchanged pair, which is one on J(μ) − J(π), as one on J(π) − J(μ).

    Args:
        horizon: T.
        found: Numbers of the pairs.
        exchanged: The same pairs and rewards with μ and π exchanged.
    """
    by_max, by_sum = penalties(found, horizon, found.xi)
    lowest = np.minimum(by_max, by_sum)
    centered = np.minimum(*penalties(found, horizon, found.half_range))
    by_kl = found.xi * horizon * (horizon - 1) * found.max_kl  # Pinsker in the max form
    reversed_bound = exchanged.surrogate - np.minimum(*penalties(exchanged, horizon, exchanged.xi))
    rows = {
        "pairs": np.ones(len(lowest), dtype=bool),
        "identity off by 1e-12": np.abs(found.change - found.surrogate + found.error) > 1e-12,
        "violated": found.change < found.surrogate - lowest,
        "violated: max form": found.change < found.surrogate - by_max,
        "violated: sum form": found.change < found.surrogate - by_sum,
        "violated: half range": found.change < found.surrogate - centered,
        "violated: KL ball": found.change < found.surrogate - by_kl,
        "positive": found.surrogate > lowest,
        "positive: half range": found.surrogate > centered,
        "positive: KL ball": found.surrogate > by_kl,
        "control: penalty x 0.1": found.change < found.surrogate - FACTOR * lowest,
        "control: exchanged": found.change < reversed_bound,
        "violated: J(μ) − J(π), all exchanged": exchanged.change < reversed_bound,
    }
    return {name: int(row.sum()) for name, row in rows.items()}


def kinds(num: int, seed: int, moves: Sequence[str] = MOVES) -> Iterator[tuple[int, Exact, Exact]]:
    """Yields T, the exact numbers of `num` pairs of each kind, and those with μ and π exchanged."""
    rng = np.random.default_rng(seed)
    for (horizon, words), ends, move, rewards in product(SHAPES, (False, True), moves, REWARDS):
        pairs = draw(rng, num, horizon, words, move=move, ends=ends)
        reward = rewards_of(pairs, rng, rewards)
        yield horizon, measured(pairs, reward), measured(Pairs(pairs.policy, pairs.behavior), reward)


def counted(num: int, seed: int, moves: Sequence[str] = MOVES) -> dict[str, int]:
    """Adds the counts of all kinds of pairs."""
    total: Counter[str] = Counter()
    for horizon, found, exchanged in kinds(num, seed, moves):
        total.update(count(horizon, found, exchanged))
    return dict(total)


def main() -> None:
    """Prints the counts of all kinds of pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000, help="Number of pairs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begun = time.perf_counter()
    for name, num in counted(options.pairs, options.seed).items():
        print(f"{name:<40} {num:>7,}")
    tightest = max(
        float((found.error / np.minimum(*penalties(found, horizon, found.xi))).max())
        for horizon, found, _ in kinds(options.pairs, options.seed)
    )
    print(f"{'largest error / penalty':<40} {tightest:>7.3f}")
    cut = counted(options.pairs, options.seed, ("cut",))
    for name in ("pairs", "violated: max form", "violated: sum form"):
        print(f"{'μ cut, as by top-k: ' + name:<40} {cut[name]:>7,}")
    print(f"{time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()

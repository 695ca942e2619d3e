"""Tokens that a loss keeps: truth tables, and thresholds and weight caps.

The tables are those of PPO, DPPO, and policy gradient. They depend on advantage, direction, and distance. The gradient
of a kept token is -w·A·c, where c is the scale of a token that did not move, and w = π/μ.

Thresholds and caps are measured by bisection rather than read from the loss's settings. A threshold that is the same
gap π - μ from two starting points is a bound on total variation. The same binary KL is a bound in nats, and the same
ratio is a bound on the ratio.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from trustrl.tools.conformance.expectations import (
    KINDS,
    WITH_A_TABLE,
    Adapter,
    Answer,
    Expectation,
    Outcome,
    ask,
    judged,
    with_reference_token,
)

STARTS = (0.3, 0.6)
"""μ of the two starting points."""

ALIKE = 0.01
"""Relative difference below which two bounds are equal."""

STEPS = 22
"""Number of bisection steps, which reach float32 precision."""

PUBLISHED = {"TV": (0.15, 0.2), "nats": (0.05,)}
"""DPPO's published bounds: 0.15 by default, 0.2 in its 8B and 30B runs, and 0.05 for KL. arXiv:2602.04879."""

SMALLEST_CAP = 5.0
"""DPPO's published cap on the ratio in its scaling runs; other runs have none. The paper shows that 3 fails."""


class Bound(NamedTuple):
    """A statistic and the value beyond which the loss masks tokens."""

    unit: str
    value: float

    def __str__(self) -> str:
        what = {"TV": "|π − μ|", "nats": "binary KL", "ratio": "|π/μ − 1|"}[self.unit]
        return f"{what} {self.value:.4g}{' nats' if self.unit == 'nats' else ''}"


def binary_kl(behavior: float, policy: float) -> float:
    """Returns μ log(μ/π) + (1-μ) log((1-μ)/(1-π)), in nats."""
    return behavior * math.log(behavior / policy) + (1 - behavior) * math.log((1 - behavior) / (1 - policy))


def _answer(loss: Adapter, policy: float, behavior: float, advantage: float) -> Answer:
    return ask(loss, with_reference_token(policy=math.log(policy), behavior=math.log(behavior), advantage=advantage))


def weight(loss: Adapter, *, policy: float, behavior: float, advantage: float) -> float:
    """Returns the gradient of a token relative to the reference token, or NaN if that has none."""
    answer = _answer(loss, policy, behavior, advantage)
    still = float(answer.gradient[1, 0]) if answer.is_finite else 0.0
    return float(answer.gradient[0, 0]) / still / advantage if still else math.nan


@lru_cache(maxsize=2)  # the measurement and the check share one search
def bound(loss: Adapter, advantage: float) -> Bound | str:
    """Returns the bound beyond which an outward update is masked, or a description if there is no single bound."""
    ends = [_stop(loss, start, advantage) for start in STARTS]
    edges = [(start, end) for start, end in zip(STARTS, ends, strict=True) if end is not None]
    if not edges:
        return "never masked"
    if len(edges) < len(STARTS):
        return f"masked only from μ = {edges[0][0]:g}, at π = {edges[0][1]:.4g}"
    statistics: dict[str, Callable[[float, float], float]] = {
        "TV": lambda b, p: abs(p - b),
        "nats": binary_kl,
        "ratio": lambda b, p: abs(p / b - 1),
    }
    for unit, measure in statistics.items():
        low, high = sorted(measure(b, p) for b, p in edges)
        if high - low <= ALIKE * high:
            return Bound(unit, (low + high) / 2)
    return "masked at " + " and ".join(f"π = {p:.4g} from μ = {b:g}" for b, p in edges)


def _stop(loss: Adapter, behavior: float, advantage: float) -> float | None:
    """Returns the π beyond which the gradient is 0, between μ and almost 1 or almost 0, or None."""
    kept, stopped = behavior, 0.999 if advantage > 0 else 0.001
    if weight(loss, policy=stopped, behavior=behavior, advantage=advantage) != 0:
        return None
    for _ in range(STEPS):
        middle = (kept + stopped) / 2
        if weight(loss, policy=middle, behavior=behavior, advantage=advantage) == 0:
            stopped = middle
        else:
            kept = middle
    return (kept + stopped) / 2


def _told(measured: object) -> Outcome:
    return Outcome("tells", "", str(measured))


def _tell_cap(loss: Adapter) -> Outcome:
    """Measures the weight of a rare token that rose and is pulled back. PPO and DPPO keep it, up to a cap."""
    kept = 1.0
    for ratio in (1.5 * 2**power for power in range(12)):
        factor = _pulled_back(loss, ratio)
        if factor == 0:
            return _told(f"its ratio; masked above {_last_kept(loss, kept, ratio):.4g}")
        if abs(factor - ratio) > ALIKE * ratio:
            return _told(f"{factor:.4g} at ratio {ratio:.4g}")
        kept = ratio
    return _told(f"its ratio, up to at least {kept:.0f}")


def _pulled_back(loss: Adapter, ratio: float) -> float:
    behavior = 1e-4
    return weight(loss, policy=behavior * ratio, behavior=behavior, advantage=-1.0)


def _last_kept(loss: Adapter, kept: float, stopped: float) -> float:
    for _ in range(STEPS):
        middle = (kept + stopped) / 2
        kept, stopped = (kept, middle) if _pulled_back(loss, middle) == 0 else (middle, stopped)
    return kept


def _published_bounds(loss: Adapter) -> Outcome:
    expected = "|π − μ| 0.15 or 0.2, or binary KL 0.05 nats, on both sides"
    bounds = [bound(loss, advantage) for advantage in (1.0, -1.0)]
    fits = all(
        isinstance(limit, Bound)
        and any(math.isclose(limit.value, value, rel_tol=ALIKE) for value in PUBLISHED.get(limit.unit, ()))
        for limit in bounds
    )
    return judged(fits, expected, f"{bounds[0]} upward, {bounds[1]} downward", otherwise="differs")


def _published_cap(loss: Adapter) -> Outcome:
    ratio = 0.98 * SMALLEST_CAP
    factor = _pulled_back(loss, ratio)
    fits = abs(factor - ratio) <= ALIKE * ratio
    return judged(fits, f"weight {ratio:.3g} at ratio {ratio:.3g}", f"weight {factor:.3g}", otherwise="differs")


DPPO = "DPPO's published settings, arXiv:2602.04879"
BOUNDS = (
    Expectation("where a rising token is masked (A > 0)", "measured", lambda loss: _told(bound(loss, 1.0)), KINDS),
    Expectation("where a falling token is masked (A < 0)", "measured", lambda loss: _told(bound(loss, -1.0)), KINDS),
    Expectation("weight of a rare token that rose and is pulled back", "measured", _tell_cap, KINDS),
    Expectation("bounds with these settings", f"{DPPO}.", _published_bounds, ("dppo",)),
    Expectation("cap on weights with these settings", f"{DPPO}: none, or 5.", _published_cap, ("dppo",)),
)


CLOSE = 1e-3

PAPERS = {
    "ppo": "PPO, arXiv:1707.06347 eq. 7: min(rA, clip(r)A).",
    "dppo": "DPPO, arXiv:2602.04879 eq. 12: masked only outside the region and if pushed further out.",
    "pg": "The policy gradient masks nothing.",
}


class Cell(NamedTuple):
    """A token: its probability before and now, its advantage, and the kinds that mask it."""

    behavior: float
    policy: float
    advantage: float
    masked_by: tuple[str, ...]
    word: str


CELLS = (
    # Inside: ratios of 1.04 and 0.96, TV 0.02. Outside: ratios of 2.8 and 0.35, TV 0.55, KL 0.77 and 0.65 nats.
    # Every published bound lies between them. The ratios stay below 3, the lowest cap in use.
    Cell(0.50, 0.52, +1.0, (), "inside, risen, pushed up"),
    Cell(0.50, 0.52, -1.0, (), "inside, risen, pulled back"),
    Cell(0.50, 0.48, +1.0, (), "inside, fallen, pulled back"),
    Cell(0.50, 0.48, -1.0, (), "inside, fallen, pushed down"),
    Cell(0.30, 0.85, +1.0, ("ppo", "dppo"), "outside, risen, pushed up"),
    Cell(0.30, 0.85, -1.0, (), "outside, risen, pulled back"),
    Cell(0.85, 0.30, +1.0, (), "outside, fallen, pulled back"),
    Cell(0.85, 0.30, -1.0, ("ppo", "dppo"), "outside, fallen, pushed down"),
    # PPO and DPPO disagree on these.
    Cell(1e-4, 2.5e-4, +1.0, ("ppo",), "a rare token, risen, pushed up"),
    Cell(1e-3, 2e-4, -1.0, ("ppo",), "a rare token, fallen, pushed down"),
)


def _row(kind: str, cell: Cell) -> Expectation:
    masked = kind in cell.masked_by
    ratio = cell.policy / cell.behavior

    def check(loss: Adapter) -> Outcome:
        answer = _answer(loss, cell.policy, cell.behavior, cell.advantage)
        expected = "masked: gradient 0" if masked else f"kept: weight {ratio:.4g}"
        if not answer.is_finite:
            return Outcome("fails", expected, answer.short())
        weight = float(answer.gradient[0, 0] / answer.gradient[1, 0]) / cell.advantage
        got = f"weight {weight:.4g}"
        if masked:
            return judged(weight == 0, expected, got)
        if kind == "pg":  # with or without an importance weight, and with any cap on it
            return judged(weight > 0, "kept: a weight above 0", got)
        return judged(abs(weight - ratio) <= CLOSE * ratio, expected, got)

    sign = "A > 0" if cell.advantage > 0 else "A < 0"
    name = f"{cell.word}: {sign}, μ {cell.behavior:g} → π {cell.policy:g}"
    return Expectation(name, PAPERS[kind], check, (kind,))


def _without_advantage(loss: Adapter) -> Outcome:
    """Checks tokens inside and outside the region."""
    answers = [_answer(loss, policy, behavior, 0.0) for behavior, policy in ((0.5, 0.52), (0.3, 0.85), (0.85, 0.3))]
    gradients = [float(answer.gradient[0, 0]) if answer.is_finite else math.nan for answer in answers]
    return judged(all(g == 0 for g in gradients), "gradient 0", f"gradients {gradients}")


TABLES = (
    *(_row(kind, cell) for kind in WITH_A_TABLE for cell in CELLS),
    Expectation("a token with A = 0", "Its term is a multiple of A.", _without_advantage, WITH_A_TABLE),
)

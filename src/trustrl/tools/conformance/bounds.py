"""Thresholds and weight caps of a loss, measured by bisection rather than read from its settings.

A threshold that is the same gap π - μ from two starting points is a bound on total variation. The same binary KL is a
bound in nats, and the same ratio is a bound on the ratio.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from trustrl.tools.conformance.adapters import Adapter
from trustrl.tools.conformance.batches import with_reference_token
from trustrl.tools.conformance.expectations import KINDS, Expectation, Outcome, ask, judged

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


def weight(loss: Adapter, *, policy: float, behavior: float, advantage: float) -> float:
    """Returns the gradient of a token relative to the reference token, or NaN if that has none."""
    answer = ask(loss, with_reference_token(policy=math.log(policy), behavior=math.log(behavior), advantage=advantage))
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


def _tell_bound(loss: Adapter, advantage: float) -> Outcome:
    return Outcome("tells", "", str(bound(loss, advantage)))


def _tell_cap(loss: Adapter) -> Outcome:
    """Measures the weight of a rare token that rose and is pulled back. PPO and DPPO keep it, up to a cap."""
    kept = 1.0
    for ratio in (1.5 * 2**power for power in range(12)):
        factor = _pulled_back(loss, ratio)
        if factor == 0:
            return Outcome("tells", "", f"its ratio; masked above {_last_kept(loss, kept, ratio):.4g}")
        if abs(factor - ratio) > ALIKE * ratio:
            return Outcome("tells", "", f"{factor:.4g} at ratio {ratio:.4g}")
        kept = ratio
    return Outcome("tells", "", f"its ratio, up to at least {kept:.0f}")


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
    Expectation("where a rising token is masked (A > 0)", "measured", lambda loss: _tell_bound(loss, 1.0), KINDS),
    Expectation("where a falling token is masked (A < 0)", "measured", lambda loss: _tell_bound(loss, -1.0), KINDS),
    Expectation("weight of a rare token that rose and is pulled back", "measured", _tell_cap, KINDS),
    Expectation("bounds with these settings", f"{DPPO}.", _published_bounds, ("dppo",)),
    Expectation("cap on weights with these settings", f"{DPPO}: none, or 5.", _published_cap, ("dppo",)),
)

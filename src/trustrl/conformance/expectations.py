"""What may be expected of a loss: a name, the kinds of loss it holds for, the reason, and a check."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trustrl.conformance.adapters import Adapter

Verdict = Literal["passes", "fails", "differs", "tells"]
"""fails: plain arithmetic or the kind's paper says otherwise. differs: from a published default, or from the rule that
trustrl follows and others need not. tells: no judgement, only what was measured."""

KINDS = ("any", "ppo", "dppo", "pg")
"""any: what every policy loss owes. ppo: a clipped ratio. dppo: a mask on a divergence. pg: nothing is stopped."""

WITH_A_TABLE = ("ppo", "dppo", "pg")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check found."""

    verdict: Verdict
    expected: str
    got: str = "as expected"


@dataclass(frozen=True, slots=True)
class Expectation:
    """One row of the report."""

    name: str
    because: str
    check: Callable[[Adapter], Outcome]
    kinds: tuple[str, ...] = KINDS


def judged(holds: bool, expected: str, got: str, *, otherwise: Verdict = "fails") -> Outcome:
    """`passes` where it holds, the other verdict with what was got where it does not."""
    return Outcome("passes", expected) if holds else Outcome(otherwise, expected, got)

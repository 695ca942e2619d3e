"""Truth tables of PPO, DPPO, and policy gradient: which tokens keep their gradient.

They depend on advantage, direction, and distance. The gradient of a kept token is -w·A·c, where c is the scale of a
token that did not move, and w = π/μ.
"""

import math
from typing import NamedTuple

from trustrl.tools.conformance.adapters import Adapter
from trustrl.tools.conformance.batches import with_reference_token
from trustrl.tools.conformance.expectations import WITH_A_TABLE, Expectation, Outcome, ask, judged

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


REGIONS = ("ppo", "dppo")
CELLS = (
    # Inside: ratios of 1.04 and 0.96, TV 0.02. Outside: ratios of 2.8 and 0.35, TV 0.55, KL 0.77 and 0.65 nats.
    # Every published bound lies between them. The ratios stay below 3, the lowest cap in use.
    Cell(0.50, 0.52, +1.0, (), "inside, risen, pushed up"),
    Cell(0.50, 0.52, -1.0, (), "inside, risen, pulled back"),
    Cell(0.50, 0.48, +1.0, (), "inside, fallen, pulled back"),
    Cell(0.50, 0.48, -1.0, (), "inside, fallen, pushed down"),
    Cell(0.30, 0.85, +1.0, REGIONS, "outside, risen, pushed up"),
    Cell(0.30, 0.85, -1.0, (), "outside, risen, pulled back"),
    Cell(0.85, 0.30, +1.0, (), "outside, fallen, pulled back"),
    Cell(0.85, 0.30, -1.0, REGIONS, "outside, fallen, pushed down"),
    # PPO and DPPO disagree on these.
    Cell(1e-4, 2.5e-4, +1.0, ("ppo",), "a rare token, risen, pushed up"),
    Cell(1e-3, 2e-4, -1.0, ("ppo",), "a rare token, fallen, pushed down"),
)


def _row(kind: str, cell: Cell) -> Expectation:
    masked = kind in cell.masked_by
    ratio = cell.policy / cell.behavior

    def check(loss: Adapter) -> Outcome:
        batch = with_reference_token(
            policy=math.log(cell.policy), behavior=math.log(cell.behavior), advantage=cell.advantage
        )
        answer = ask(loss, batch)
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
    answers = [
        ask(loss, with_reference_token(policy=math.log(policy), behavior=math.log(behavior), advantage=0.0))
        for behavior, policy in ((0.5, 0.52), (0.3, 0.85), (0.85, 0.3))
    ]
    gradients = [float(answer.gradient[0, 0]) if answer.is_finite else math.nan for answer in answers]
    return judged(all(g == 0 for g in gradients), "gradient 0", f"gradients {gradients}")


TABLES = (
    *(_row(kind, cell) for kind in WITH_A_TABLE for cell in CELLS),
    Expectation("a token with A = 0", "Its term is a multiple of A.", _without_advantage, WITH_A_TABLE),
)

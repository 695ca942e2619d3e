"""Expectations for extreme but valid values and for impossible values at tokens in the loss.

Valid values must have a finite answer. For impossible values, trustrl's rule is to raise or to drop the token. A loss
that turns the whole update into NaN at least makes the fault visible. A finite loss with a NaN gradient hides it.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from trustrl.tools.conformance.batch_invariants import BF16_ROUNDING, ROUNDING, difference
from trustrl.tools.conformance.expectations import (
    WITH_A_TABLE,
    Adapter,
    Answer,
    Expectation,
    Outcome,
    ask,
    healthy,
    judged,
    with_reference_token,
)

AT = (1, 3)
"""Token to change. It is in the loss and has advantage -1.5."""


def _far_answers(loss: Adapter, policy: float, behavior: float) -> dict[float, Answer]:
    return {
        advantage: ask(loss, with_reference_token(policy=policy, behavior=behavior, advantage=advantage))
        for advantage in (1.0, -1.0)
    }


def _far_is_finite(policy: float, behavior: float, label: str) -> Expectation:
    def check(loss: Adapter) -> Outcome:
        answers = _far_answers(loss, policy, behavior)
        wrong = [f"A = {sign:+g}: {answer.short()}" for sign, answer in answers.items() if not answer.is_finite]
        return judged(not wrong, "finite", "; ".join(wrong))

    return Expectation(f"a token with ratio {label}", "Both log-probs are valid and finite.", check)


def _far_has_its_sign(policy: float, behavior: float, label: str) -> Expectation:
    def check(loss: Adapter) -> Outcome:
        still = float(ask(loss, with_reference_token(policy=-1.0, behavior=-1.0, advantage=1.0)).gradient[1, 0])
        wrong = []
        for sign, answer in _far_answers(loss, policy, behavior).items():
            if not answer.is_finite:
                continue  # another case covers it
            moved, other = (float(answer.gradient[row, 0]) for row in (0, 1))
            if moved * sign > 0:
                wrong.append(f"A = {sign:+g}: gradient {moved:.3g} pushes the wrong way")
            if abs(other - still) > ROUNDING * abs(still):
                wrong.append(f"A = {sign:+g}: the other token has {other:.3g} instead of {still:.3g}")
        return judged(not wrong, "the advantage's sign or 0, and the other token unchanged", "; ".join(wrong))

    return Expectation(f"sign at ratio {label}", "The term is a multiple of A.", check, WITH_A_TABLE)


def _impossible(field: str, value: float, label: str) -> Expectation:
    def check(loss: Adapter) -> Outcome:
        start = healthy()
        where = torch.zeros_like(start.in_loss)
        where[AT] = True
        without = replace(start, in_loss=start.in_loss & ~where)
        answer = ask(loss, start.put(field, value, where))
        return _left_out(answer, ask(loss, start).gradient, ask(loss, without, whole=start).gradient)

    return Expectation(f"{label} at a token in the loss", "No sampled token has such a value.", check)


def _left_out(answer: Answer, wanted: Tensor, without: Tensor) -> Outcome:
    """Compares with the gradient of the valid batch and with that of the batch without the token."""
    expected = "an error, or that token dropped and the others unchanged"
    if answer.error:
        return Outcome("passes", expected, f"raised {answer.error}")
    if not answer.gradient.isfinite().all():
        if math.isfinite(answer.value):
            return Outcome("fails", expected, f"loss {answer.value:.4g} is finite, but {answer.short()}")
        return Outcome("differs", expected, f"the update is lost: {answer.short()}")
    # From here on the gradient decides. A NaN loss with a valid gradient reports the fault and does no harm.
    if torch.equal(answer.gradient, wanted):
        return Outcome("passes", expected, "not read: the gradient is that of the valid batch")
    entry = float(answer.gradient[AT])
    if entry != 0:
        return Outcome("differs", expected, f"used silently: its gradient is {entry:.3g}")
    row = AT[0]
    elsewhere = [other for other in range(len(wanted)) if other != row]
    if difference(answer.gradient[elsewhere], wanted[elsewhere]) > ROUNDING:
        return Outcome("differs", expected, "other sequences' gradients change")
    rest = [column for column in range(wanted.shape[1]) if column != AT[1]]
    mine = answer.gradient[row, rest]
    unchanged = difference(mine, wanted[row, rest]) <= ROUNDING or _is_a_multiple(mine, without[row, rest])
    return judged(unchanged, expected, "its sequence's other gradients change", otherwise="differs")


def _is_a_multiple(got: Tensor, of: Tensor) -> bool:
    """Returns whether `got` is a positive multiple of `of`.

    The mean over a sequence without the token, still divided by the full length, is such a multiple.
    """
    factor = float((got * of).sum() / of.square().sum()) if of.any() else 0.0
    return factor > 0 and difference(got, factor * of) <= ROUNDING


NEAR_CERTAIN = (-0.0202, -0.001)
"""log μ and log π of a token that moved by 0.019, or 0.041 nats. In bf16, π is 1 and 1 - π is 0."""


def _near_certain_in_bf16(loss: Adapter) -> Outcome:
    behavior, policy = NEAR_CERTAIN
    answer = ask(loss, with_reference_token(policy=policy, behavior=behavior, advantage=1.0, dtype=torch.bfloat16))
    expected = "kept, weight 1.02: it moved by 0.019, or 0.041 nats"
    if not answer.is_finite:
        return Outcome("fails", expected, answer.short())
    weight = float(answer.gradient[0, 0] / answer.gradient[1, 0])
    return judged(abs(weight - math.exp(policy - behavior)) < BF16_ROUNDING, expected, f"weight {weight:.3g}")


IMPOSSIBLE = (
    ("logp", math.nan, "log π = NaN"),
    ("logp", -math.inf, "log π = -inf"),
    ("logp", 0.5, "log π = +0.5"),
    ("behavior_logp", math.nan, "log μ = NaN"),
    ("behavior_logp", -math.inf, "log μ = -inf"),
    ("behavior_logp", 0.5, "log μ = +0.5"),
    ("advantage", math.nan, "advantage NaN"),
    ("advantage", math.inf, "advantage inf"),
)

FAR = ((-0.1, -20.1, "e²⁰"), (-0.1, -100.1, "e¹⁰⁰"), (-20.1, -0.1, "e⁻²⁰"), (-100.1, -0.1, "e⁻¹⁰⁰"))
"""log π, log μ, and the ratio."""

FAULTS = (
    *(_far_is_finite(*far) for far in FAR),
    *(_far_has_its_sign(*far) for far in FAR),
    *(_impossible(field, value, label) for field, value, label in IMPOSSIBLE),
    Expectation(
        "a near-certain token in bf16", "It is inside every published bound.", _near_certain_in_bf16, WITH_A_TABLE
    ),
)

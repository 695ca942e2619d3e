"""Expectations of every policy loss: tokens outside the loss have no effect, and micro-batches add up."""

import math

import torch
from torch import Tensor

from trustrl.tools.conformance.expectations import Adapter, Answer, Batch, Expectation, Outcome, ask, healthy, judged

ROUNDING = 1e-5
"""Largest difference, relative to the largest gradient, that counts as float32 rounding."""

BF16_ROUNDING = 0.05
MASKED = "A token outside the loss must have no effect."
ADDING = "The gradient of a sum is the sum of gradients."
NOT_FINITE = (math.nan, math.inf, -math.inf)


def difference(got: Tensor, wanted: Tensor) -> float:
    """Returns the largest difference relative to the largest wanted value. NaN counts as infinite."""
    size = float(wanted.abs().max()) if wanted.numel() else 0.0
    gap = float((got - wanted).abs().max()) if wanted.numel() else 0.0
    return math.inf if math.isnan(gap) else gap / (size or 1.0)


def same(answer: Answer, wanted: Tensor, expected: str, tolerance: float = ROUNDING) -> Outcome:
    """Checks for the wanted gradient and a finite loss."""
    if not answer.is_finite:
        return Outcome("fails", expected, answer.short())
    gap = difference(answer.gradient, wanted)
    return judged(gap <= tolerance, expected, f"gradient off by {gap:.2g} of its largest entry")


def _padding_holds(field: str, values: tuple[float, ...]) -> Expectation:
    def check(loss: Adapter) -> Outcome:
        start = healthy()
        wanted = ask(loss, start).gradient
        expected = "the gradient with finite values there, and 0 there"
        wrong = []
        for value in values:
            outcome = same(ask(loss, start.put(field, value, ~start.in_loss)), wanted, expected)
            if outcome.verdict != "passes":
                wrong.append(f"{value:g}: {outcome.got}")
        return judged(not wrong, expected, "; ".join(wrong))

    shown = {"logp": "log π", "behavior_logp": "log μ", "advantage": "advantages"}[field]
    return Expectation(f"{shown} outside the loss may be NaN, inf or -inf", MASKED, check)


def _far_ratio_in_padding(loss: Adapter) -> Outcome:
    start = healthy()
    far = start.put("behavior_logp", -200.0, ~start.in_loss).put("logp", -0.1, ~start.in_loss)
    return same(ask(loss, far), ask(loss, start).gradient, "the gradient with ordinary values there")


def _masked_gradient(loss: Adapter) -> Outcome:
    start = healthy()
    gradient = ask(loss, start).gradient[~start.in_loss]
    return judged(bool((gradient == 0).all()), "exactly 0", f"up to {float(gradient.abs().max()):.3g}")


def _all_masked(loss: Adapter) -> Outcome:
    whole = healthy()
    nothing = Batch(whole.logp, whole.behavior_logp, whole.advantage, torch.zeros_like(whole.in_loss))
    answer = ask(loss, nothing, whole=whole)
    expected = "loss 0 and gradient 0"
    if not answer.is_finite:
        return Outcome("fails", expected, answer.short())
    return judged(answer.value == 0 and not answer.gradient.any(), expected, answer.short())


def _empty(rows: int, width: int) -> Expectation:
    def check(loss: Adapter) -> Outcome:
        whole = healthy()
        answer = ask(loss, whole.rows((slice(rows), slice(width))), whole=whole)
        expected = "loss 0, or an error"
        return judged(bool(answer.error) or answer.value == 0, expected, answer.short())

    return Expectation(f"a batch of {rows} rows and {width} columns", "A sum over nothing is 0.", check)


def _empty_row(loss: Adapter) -> Outcome:
    start = healthy()
    masked = start.in_loss.clone()
    masked[1] = False
    with_it = Batch(start.logp, start.behavior_logp, start.advantage, masked)
    wanted = torch.zeros_like(start.logp, dtype=torch.float64)
    others = [0, 2, 3]
    wanted[others] = ask(loss, start.rows(others)).gradient
    answer, expected = ask(loss, with_it), "the gradient of the batch without that row"
    factor = float((answer.gradient * wanted).sum() / wanted.square().sum()) if answer.is_finite else 1.0
    if same(answer, factor * wanted, expected).verdict == "passes" and abs(factor - 1) > ROUNDING:
        return Outcome("differs", expected, f"that gradient times {factor:.3g}: the mean counts the row")
    return same(answer, wanted, expected)


def _more_padding(loss: Adapter) -> Outcome:
    start = healthy()
    wanted = torch.nn.functional.pad(ask(loss, start).gradient, (0, 3))
    return same(ask(loss, start.padded(3)), wanted, "the gradient of the narrower batch")


def _row_order(loss: Adapter) -> Outcome:
    start, order = healthy(), [2, 0, 3, 1]
    return same(ask(loss, start.rows(order)), ask(loss, start).gradient[order], "the rows' gradients, in that order")


def _micro_batches(loss: Adapter) -> Outcome:
    """Checks that parts add up: as they are with global counts, weighted by their size with local means."""
    whole = healthy()
    parts = [whole.rows(slice(0, 1)), whole.rows(slice(1, 4))]
    wanted = ask(loss, whole).gradient
    answers = [ask(loss, part, whole=whole) for part in parts]
    expected = "parts of 1 and 3 rows add up to the whole batch's gradient"
    if any(not answer.is_finite for answer in answers):
        return Outcome("fails", expected, next(answer.short() for answer in answers if not answer.is_finite))
    weighings = {
        "": [1.0, 1.0],
        "only when each part is weighted by its tokens": [part.num_tokens / whole.num_tokens for part in parts],
        "only when each part is weighted by its rows": [part.num_sequences / whole.num_sequences for part in parts],
    }
    gaps = {}
    for how, weights in weighings.items():
        total = torch.cat([weight * answer.gradient for weight, answer in zip(weights, answers, strict=True)])
        gaps[how] = difference(total, wanted)
    fits = next((how for how, gap in gaps.items() if gap <= ROUNDING), None)
    if fits == "":
        return Outcome("passes", expected)
    if fits is None:
        return Outcome("fails", expected, f"off by {gaps['']:.2g} of its largest entry, even when weighted by size")
    return Outcome("fails" if loss.counts_are_global else "tells", expected, fits)


def _on_policy(loss: Adapter) -> Outcome:
    start = healthy()
    batch = Batch(start.behavior_logp, start.behavior_logp, start.advantage, torch.ones_like(start.in_loss))
    answer = ask(loss, batch)
    expected = "-c·A at every token with one c > 0"
    if not answer.is_finite:
        return Outcome("fails", expected, answer.short())
    scale = -float((answer.gradient * batch.advantage).sum() / batch.advantage.square().sum())
    gap = difference(answer.gradient, -scale * batch.advantage.double())
    if scale <= 0 or gap > ROUNDING:
        return Outcome("fails", expected, f"c = {scale:.4g}, off by {gap:.2g} of its largest entry")
    return Outcome("passes", expected, f"c = {scale:.4g} (1/{1 / scale:.4g}) with 24 tokens in 4 rows")


def _constant_behavior(loss: Adapter) -> Outcome:
    answer = ask(loss, healthy(), of_behavior=True)
    expected = "no gradient with respect to log μ, even if it requires one"
    if answer.error:
        return Outcome("passes", expected, f"raised {answer.error}")
    reached = answer.behavior_gradient
    assert reached is not None  # requested above
    return judged(not reached.any(), expected, f"up to {float(reached.abs().max()):.2g}", otherwise="differs")


def _bf16(loss: Adapter) -> Outcome:
    rounded = healthy().to(torch.bfloat16)
    wanted = ask(loss, rounded.to(torch.float32)).gradient
    return same(ask(loss, rounded), wanted, "within 5% of the float32 gradient at the same values", BF16_ROUNDING)


BATCH_INVARIANTS = (
    *(_padding_holds(field, NOT_FINITE) for field in ("logp", "behavior_logp", "advantage")),
    Expectation("a ratio of e²⁰⁰ outside the loss", MASKED, _far_ratio_in_padding),
    Expectation("the gradient outside the loss", MASKED, _masked_gradient),
    Expectation("a batch with no token in the loss", "A sum over nothing is 0.", _all_masked),
    _empty(0, 6),
    _empty(4, 0),
    Expectation("a row with no token in the loss", MASKED, _empty_row),
    Expectation("three more columns of padding", MASKED, _more_padding),
    Expectation("rows in another order", "A sum has no order.", _row_order),
    Expectation("a batch in two micro-batches", ADDING, _micro_batches),
    Expectation("on-policy, π = μ", "At r = 1 every region's gradient is the policy gradient.", _on_policy),
    Expectation("log μ is a constant", "The sampler recorded it.", _constant_behavior),
    Expectation("inputs in bf16", "Rounding the inputs changes them by at most 2⁻⁸.", _bf16),
)

"""Result of a probe: the cause of the gap between sampler and trainer, quantiles, and worst tokens.

`diagnose` compares the recorded log-probs with the trainer's as configured. If they differ by more than rounding, it
tries each common mistake on the trainer's side: raw log-probs, another temperature, and truncation that only the
sampler renormalizes. The mistake that leaves a small gap is the cause. If none does, the weights differ.

A mixture of experts has one more cause. Rounding can change a router's choice, and a token that goes to other experts
has a much larger gap than its neighbors. If both sides' choices are known, `diagnose` compares the gap of rerouted
tokens with that of the others. Otherwise it asks if few tokens carry much of the gap.

Token text in a report is escaped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trustrl.engines.common.step_check import LARGEST_GAP
from trustrl.tools.probe import EXACT, WHAT_TO_DO
from trustrl.tools.probe.sampling import Completion
from trustrl.tools.probe.trainer_logprobs import Readings

EXPLAINS = 0.3
"""Largest share of the gap that an explanation may leave."""

ROUNDINGS = 4.0
"""Number of bf16 roundings that a log-prob may accumulate over the layers."""

REROUTED = 3.0
"""Smallest factor between the mean gap of rerouted tokens and that of the others. Chosen after
measuring 11.5 and 14.7 on two small mixtures in bf16."""

FEWEST = 3
"""Smallest number of rerouted tokens to judge by."""

FEW, CONCENTRATED = 0.05, 0.3
"""Without the sampler's routing: the share of tokens with the largest gaps, and the share of the whole gap that they
carry if routing is the cause. Chosen after measuring 0.20 and 0.23 on dense models and 0.33 and 0.35 on mixtures."""

IMPOSSIBLE = 1.0
"""Cap on the gap of one token, in nats. Rounding can move a token across the edge of a nucleus."""

SHARES = (0.01, 0.5, 0.99)
CONTEXT = 8


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Cause of a gap, with the gap before and after the explanation."""

    cause: str
    """A key of `WHAT_TO_DO`."""

    detail: str
    gap: float
    """Mean |Δ log p| as configured, in nats."""

    left: float
    """Mean |Δ log p| that the explanation leaves, in nats."""

    @property
    def is_sound(self) -> bool:
        """True if the gap is harmless for training."""
        return self.cause in ("agreement", "rounding")


def diagnose(recorded: Tensor, readings: Readings) -> Diagnosis:
    """Returns the cause of the gap between recorded log-probs and the trainer's log-probs of the same tokens."""
    gap = _gap(recorded, readings.as_set)
    if gap <= EXACT:
        return Diagnosis("agreement", "sampler and trainer agree", gap, gap)
    left = {name: _gap(recorded, logp) for name, logp in readings.otherwise.items()}
    best = min(left, key=lambda name: left[name])
    if left[best] <= EXPLAINS * gap:
        kind = "truncation" if best.startswith("top-") else "temperature" if best.startswith("temperature") else best
        return Diagnosis(kind, f"the recorded log-probs match {best}", gap, left[best])
    rounding = ROUNDINGS * float(readings.rounding.mean())
    routed = _routing(recorded, readings, min(rounding, LARGEST_GAP["sampler"]))
    if routed is not None:
        return Diagnosis("routing", routed[0], gap, routed[1])
    if gap <= min(rounding, LARGEST_GAP["sampler"]):
        return Diagnosis("rounding", f"within half-precision rounding (up to {rounding:.2g} nats here)", gap, gap)
    return Diagnosis("weights", "no common mistake explains the gap", gap, left[best])


def _routing(recorded: Tensor, readings: Readings, rounding: float) -> tuple[str, float] | None:
    """Returns the evidence that routing made the gap and the mean gap of all other tokens, or None."""
    gap = _gaps(recorded, readings.as_set)
    if not readings.routes or not gap.any():
        return None
    if readings.rerouted is not None:
        # Deep mixtures reroute most tokens in some layer, so a token counts if more of its layers differ than usual.
        on = readings.rerouted > readings.rerouted.double().median()
        if on.sum() < FEWEST:
            return None
        inside, outside = float(gap[on].mean()), float(gap[~on].mean())
        if inside < REROUTED * outside or outside > rounding:
            return None
        carried = float(gap[on].sum() / gap.sum())
        detail = f"{float(on.double().mean()):.1%} of the tokens went to other experts, with a mean gap of {inside:.2g}"
        return f"{detail} nats instead of {outside:.2g}, {carried:.0%} of the whole gap", outside
    few = max(1, round(FEW * len(gap)))
    ordered = gap.sort(descending=True).values
    carried, outside = float(ordered[:few].sum() / ordered.sum()), float(ordered[few:].mean())
    if carried < CONCENTRATED or outside > rounding:
        return None
    return f"{FEW:.0%} of the tokens carry {carried:.0%} of the gap; the sampler did not return its routing", outside


def _gap(recorded: Tensor, logp: Tensor) -> float:
    return float(_gaps(recorded, logp).mean())


def _gaps(recorded: Tensor, logp: Tensor) -> Tensor:
    gap = (recorded.double() - logp.double()).abs()
    return torch.where(gap.isfinite(), gap, IMPOSSIBLE).clamp(max=IMPOSSIBLE)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Result of one probe."""

    tokens: int
    quantiles: dict[str, dict[str, float]]
    worst: list[dict[str, Any]]
    diagnosis: Diagnosis

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `trustrl probe --json` prints."""
        diagnosis = self.diagnosis
        verdict = {"cause": diagnosis.cause, "detail": diagnosis.detail, "gap": diagnosis.gap, "left": diagnosis.left}
        verdict |= {"is_sound": diagnosis.is_sound, "what_to_do": WHAT_TO_DO[diagnosis.cause]}
        return {"tokens": self.tokens, "verdict": verdict, "quantiles": self.quantiles, "worst": self.worst}


def report(
    completions: Sequence[Completion],
    recorded: Tensor,
    readings: Readings,
    diagnosis: Diagnosis,
    text_of: Callable[[list[int]], str],
    worst: int = 5,
) -> ProbeReport:
    """Builds the report from recorded log-probs, the trainer's readings, and a tokenizer's `decode`."""
    gap = readings.as_set - recorded.double()
    probabilities = readings.as_set.exp(), recorded.double().exp()
    measured = {
        "log π − log μ": gap,
        "π/μ": gap.exp(),
        "|π − μ|": (probabilities[0] - probabilities[1]).abs(),
    }
    places = [(completion, position) for completion in completions for position in range(len(completion.tokens))]
    rows = []
    for index in gap.abs().nan_to_num(nan=torch.inf).topk(min(worst, len(gap))).indices.tolist():
        completion, position = places[index]
        before = completion.prompt + completion.tokens[:position]
        rows.append(
            {
                "before": text_of(before[-CONTEXT:]),
                "token": text_of([completion.tokens[position]]),
                "trainer": float(readings.as_set[index]),
                "sampler": float(recorded[index]),
            }
        )
    quantiles = {}
    for name, x in measured.items():
        values = torch.quantile(x, torch.tensor(SHARES, dtype=x.dtype)).tolist()
        named = {f"p{round(100 * share):02d}": value for share, value in zip(SHARES, values, strict=True)}
        quantiles[name] = {"mean": float(x.mean()), **named, "largest": float(x[x.abs().argmax()])}
    return ProbeReport(len(gap), quantiles, rows, diagnosis)


def text(made: ProbeReport) -> str:
    """Formats the report for the terminal."""
    names = list(next(iter(made.quantiles.values())))
    lines = [f"{made.tokens} tokens", "", f"{'':<15}" + "".join(f"{name:>11}" for name in names)]
    lines += [f"{what:<15}" + "".join(f"{x:>11.3g}" for x in row.values()) for what, row in made.quantiles.items()]
    lines += ["", "worst tokens: log π (trainer), log μ (sampler)"]
    lines += [
        f"  {row['trainer']:>9.4f} {row['sampler']:>9.4f}  {row['token']!r} after {row['before']!r}"
        for row in made.worst
    ]
    diagnosis = made.diagnosis
    lines += ["", f"verdict: {diagnosis.cause}: {diagnosis.detail}"]
    explained = f", {diagnosis.left:.3g} with the best explanation" if diagnosis.left < diagnosis.gap else ""
    lines += [f"  mean |Δ log p| {diagnosis.gap:.3g} nats as configured{explained}"]
    lines += [f"  → {WHAT_TO_DO[diagnosis.cause]}"]
    return "\n".join(lines)

"""Result of a probe: quantiles, worst tokens, and verdict. Token text is escaped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trustrl.tools.probe.diagnosis import Diagnosis
from trustrl.tools.probe.mismatch_fixes import WHAT_TO_DO
from trustrl.tools.probe.sampling import Completion
from trustrl.tools.probe.trainer_logprobs import Readings

SHARES = (0.01, 0.5, 0.99)
CONTEXT = 8


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
    return ProbeReport(len(gap), {name: _quantiles(x) for name, x in measured.items()}, rows, diagnosis)


def _quantiles(x: Tensor) -> dict[str, float]:
    quantiles = torch.quantile(x, torch.tensor(SHARES, dtype=x.dtype))
    named = {f"p{round(share * 100):02d}": float(value) for share, value in zip(SHARES, quantiles, strict=True)}
    return {"mean": float(x.mean()), **named, "largest": float(x[x.abs().argmax()])}


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

"""Diagnosis of the gap between recorded log-probs and the trainer's.

`diagnose` compares the recorded log-probs with the trainer's as configured. If they differ by more than rounding, it
tries each common mistake on the trainer's side: raw log-probs, another temperature, and truncation that only the
sampler renormalizes. The mistake that leaves a small gap is the cause. If none does, the weights differ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trustrl.engines.common.step_check import LARGEST_GAP
from trustrl.tools.probe.mismatch_fixes import EXACT
from trustrl.tools.probe.trainer_logprobs import Readings

EXPLAINS = 0.3
"""Largest share of the gap that an explanation may leave."""

ROUNDINGS = 4.0
"""Number of bf16 roundings that a log-prob may accumulate over the layers."""

IMPOSSIBLE = 1.0
"""Cap on the gap of one token, in nats. Rounding can move a token across the edge of a nucleus."""


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
        return Diagnosis(_kind(best), f"the recorded log-probs match {best}", gap, left[best])
    rounding = ROUNDINGS * float(readings.rounding.mean())
    if gap <= min(rounding, LARGEST_GAP["sampler"]):
        return Diagnosis("rounding", f"within half-precision rounding (up to {rounding:.2g} nats here)", gap, gap)
    return Diagnosis("weights", "no common mistake explains the gap", gap, left[best])


def _gap(recorded: Tensor, logp: Tensor) -> float:
    gap = (recorded.double() - logp.double()).abs()
    return float(torch.where(gap.isfinite(), gap, IMPOSSIBLE).clamp(max=IMPOSSIBLE).mean())


def _kind(name: str) -> str:
    if name.startswith("top-"):
        return "truncation"
    return "temperature" if name.startswith("temperature") else name

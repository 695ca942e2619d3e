"""Which explanation a record fits.

The record is compared with the trainer's log-probs as set. If they differ by more than rounding, each usual mistake is
tried in the trainer's place: raw log-probs, another temperature, a truncated vocabulary that was renormalised on the
sampler's side only. The one that leaves little is the cause. If none does, the weights differ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trustrl.engines.invariants import LARGEST_GAP
from trustrl.probe.readings import Readings

EXACT = 1e-3
"""Mean |Δ log p| in nats below which two float32 implementations agree."""

EXPLAINS = 0.3
"""An explanation must leave at most this share of the gap."""

ROUNDINGS = 4.0
"""Roundings of bf16 that a log-prob may carry: they add up over layers."""

IMPOSSIBLE = 1.0
"""The largest gap of one token that counts, in nats: rounding may put a token on the wrong side of a nucleus's edge."""

WHAT_TO_DO = {
    "agreement": "Nothing.",
    "rounding": "Usual for a sampler in half precision. A region anchored on the sampler's log-probs accounts for it; "
    "float32 in the sampler removes it.",
    "raw log-probs": "Ask the sampler for processed log-probs (vLLM: logprobs_mode=processed_logprobs).",
    "temperature": "Give sampler and trainer one temperature, or divide the trainer's logits by the sampler's.",
    "truncation": "Switch top-p, top-k and min-p off for training, or renormalise the trainer over the kept ids "
    "(trustrl.within_kept).",
    "weights": "Sync the weights and look again: stale ones, a tied output layer that stayed behind, another "
    "checkpoint, adapters on one side, dropout.",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause and how sure it is."""

    cause: str
    """A key of `WHAT_TO_DO`."""

    detail: str
    gap: float
    """Mean |Δ log p| as set, in nats."""

    left: float
    """What the explanation leaves of it."""

    @property
    def is_sound(self) -> bool:
        """Whether training may go on."""
        return self.cause in ("agreement", "rounding")


def diagnose(recorded: Tensor, readings: Readings) -> Diagnosis:
    """The cause of what lies between a record and the trainer's readings of the same tokens."""
    gap = _gap(recorded, readings.as_set)
    if gap <= EXACT:
        return Diagnosis("agreement", "sampler and trainer agree", gap, gap)
    left = {name: _gap(recorded, logp) for name, logp in readings.otherwise.items()}
    best = min(left, key=lambda name: left[name])
    if left[best] <= EXPLAINS * gap:
        return Diagnosis(_kind(best), f"the record is that of {best}", gap, left[best])
    rounding = ROUNDINGS * float(readings.rounding.mean())
    if gap <= min(rounding, LARGEST_GAP["sampler"]):
        return Diagnosis("rounding", f"the size of half precision (up to {rounding:.2g} here)", gap, gap)
    return Diagnosis("weights", "no usual setting explains it", gap, left[best])


def _gap(recorded: Tensor, logp: Tensor) -> float:
    gap = (recorded.double() - logp.double()).abs()
    return float(torch.where(gap.isfinite(), gap, IMPOSSIBLE).clamp(max=IMPOSSIBLE).mean())


def _kind(name: str) -> str:
    if name.startswith("top-"):
        return "truncation"
    return "temperature" if name.startswith("temperature") else name

"""What the trainer's network says about sampled tokens: as set, and under each usual mistake."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trustrl.packages import need
from trustrl.probe.samples import Completion

TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)
NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
TOP_KS = (1, 5, 10, 20, 32, 40, 50, 64, 100)


@dataclass(frozen=True, slots=True)
class Readings:
    """Log-probs of N tokens by explanation; −inf where it rules the token out."""

    as_set: Tensor
    """Of the whole vocabulary at the temperature that was asked for."""

    otherwise: dict[str, Tensor]
    """By what would have been done instead."""

    rounding: Tensor
    """2⁻⁸ times the spread of the logits: the size of what bf16 does to a log-prob."""


def of_logits(logits: Tensor, tokens: Tensor, temperature: float) -> Readings:
    """From N × V logits of the trainer, in float32 or better."""
    at = tokens.unsqueeze(-1)
    tempered = torch.log_softmax(logits / temperature, -1)
    otherwise = {}
    for other in TEMPERATURES:
        if abs(other - temperature) > 1e-6:
            name = "raw log-probs" if other == 1.0 else f"temperature {other:g}"
            otherwise[name] = torch.log_softmax(logits / other, -1).gather(-1, at).squeeze(-1)
    ordered, ids = tempered.sort(-1, descending=True)
    mass = ordered.exp().cumsum(-1)
    place = (ids == at).int().argmax(-1, keepdim=True)
    own = tempered.gather(-1, at).squeeze(-1)
    for share in NUCLEI:
        # Ids are kept until their mass reaches the share; the one that crosses it is among them.
        last = (mass < share).sum(-1, keepdim=True).clamp(max=mass.shape[-1] - 1)
        otherwise[f"top-p {share:g}"] = _within(own, place, last, mass)
    for k in TOP_KS:
        if k < logits.shape[-1]:
            otherwise[f"top-k {k}"] = _within(own, place, torch.full_like(place, k - 1), mass)
    return Readings(own, otherwise, logits.std(-1) * 2.0**-8)


def _within(own: Tensor, place: Tensor, last: Tensor, mass: Tensor) -> Tensor:
    """Renormalised over the ids up to `last`."""
    kept = own - mass.gather(-1, last).squeeze(-1).log()
    return torch.where((place <= last).squeeze(-1), kept, -torch.inf)


def joined(parts: Sequence[Readings]) -> Readings:
    """The readings of several completions, one after the other."""
    return Readings(
        torch.cat([part.as_set for part in parts]),
        {name: torch.cat([part.otherwise[name] for part in parts]) for name in parts[0].otherwise},
        torch.cat([part.rounding for part in parts]),
    )


def by_transformers(model: str, completions: Sequence[Completion], temperature: float) -> Readings:
    """As a trainer in float32 reads them, one completion at a time: logits of one are the most that is held."""
    transformers: Any = need("transformers", extra="models")
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return joined([_of_completion(network, one, temperature) for one in completions if one.tokens])


@torch.no_grad()
def _of_completion(network: Any, completion: Completion, temperature: float) -> Readings:
    ids = torch.tensor([completion.prompt + completion.tokens])
    logits = network(input_ids=ids).logits[0, len(completion.prompt) - 1 : -1].double()
    return of_logits(logits, torch.tensor(completion.tokens), temperature)

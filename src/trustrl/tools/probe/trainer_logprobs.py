"""Trainer log-probs of sampled tokens, as configured and under each common mistake."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trustrl.optional_imports import need
from trustrl.tools.probe.sampling import Completion

TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)
NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
TOP_KS = (1, 5, 10, 20, 32, 40, 50, 64, 100)


@dataclass(frozen=True, slots=True)
class Readings:
    """Log-probs of N tokens under each explanation; −inf if the explanation excludes the token."""

    as_set: Tensor
    """Over the whole vocabulary, at the requested temperature."""

    otherwise: dict[str, Tensor]
    """Log-probs under each mistake, by its name."""

    rounding: Tensor
    """2⁻⁸ times the standard deviation of the logits: the size of bf16 rounding in a log-prob."""

    routes: bool = False
    """True if the model is a mixture of experts."""

    rerouted: Tensor | None = None
    """Number of layers in which sampler and trainer sent the token to different experts, if both are known."""


def of_logits(logits: Tensor, tokens: Tensor, temperature: float) -> Readings:
    """Computes the log-probs from N × V trainer logits, in float32 or higher precision."""
    targets = tokens.unsqueeze(-1)
    tempered = torch.log_softmax(logits / temperature, -1)
    otherwise = {}
    for other in TEMPERATURES:
        if abs(other - temperature) > 1e-6:
            name = "raw log-probs" if other == 1.0 else f"temperature {other:g}"
            otherwise[name] = torch.log_softmax(logits / other, -1).gather(-1, targets).squeeze(-1)
    ordered, ids = tempered.sort(-1, descending=True)
    mass = ordered.exp().cumsum(-1)
    place = (ids == targets).int().argmax(-1, keepdim=True)
    own = tempered.gather(-1, targets).squeeze(-1)
    for share in NUCLEI:
        # Keeps ids until their mass reaches the share, including the id that crosses it.
        last = (mass < share).sum(-1, keepdim=True).clamp(max=mass.shape[-1] - 1)
        otherwise[f"top-p {share:g}"] = _within(own, place, last, mass)
    for k in TOP_KS:
        if k < logits.shape[-1]:
            otherwise[f"top-k {k}"] = _within(own, place, torch.full_like(place, k - 1), mass)
    return Readings(own, otherwise, logits.std(-1) * 2.0**-8)


def _within(own: Tensor, place: Tensor, last: Tensor, mass: Tensor) -> Tensor:
    """Returns log-probs renormalized over the ids up to rank `last`."""
    kept = own - mass.gather(-1, last).squeeze(-1).log()
    return torch.where((place <= last).squeeze(-1), kept, -torch.inf)


def joined(parts: Sequence[Readings]) -> Readings:
    """Concatenates the readings of several completions."""
    rerouted = [part.rerouted for part in parts if part.rerouted is not None]
    return Readings(
        torch.cat([part.as_set for part in parts]),
        {name: torch.cat([part.otherwise[name] for part in parts]) for name in parts[0].otherwise},
        torch.cat([part.rounding for part in parts]),
        any(part.routes for part in parts),
        torch.cat(rerouted) if len(rerouted) == len(parts) else None,
    )


def by_transformers(model: str, completions: Sequence[Completion], temperature: float) -> Readings:
    """Computes float32 log-probs with transformers, one completion at a time to limit memory."""
    transformers: Any = need("transformers", extra="models")
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return joined([_of_completion(network, completion, temperature) for completion in completions if completion.tokens])


@torch.no_grad()
def _of_completion(network: Any, completion: Completion, temperature: float) -> Readings:
    ids = torch.tensor([completion.prompt + completion.tokens])
    span = slice(len(completion.prompt) - 1, -1)
    routes = int(getattr(network.config, "num_experts_per_tok", None) or 0)
    out = network(input_ids=ids, **({"output_router_logits": True} if routes else {}))
    readings = of_logits(out.logits[0, span].double(), torch.tensor(completion.tokens), temperature)
    if not routes:
        return readings
    routers = getattr(out, "router_logits", None) or ()
    own = [x.topk(routes, -1).indices[span] for x in routers if x is not None]
    return replace(readings, routes=True, rerouted=_rerouted(own, completion.experts))


def _rerouted(own: Sequence[Tensor], experts: Any) -> Tensor | None:
    """Returns the number of layers with other experts at each token; None if a side is unknown or has other layers."""
    if experts is None or not own or experts.shape[1] != len(own) * own[0].shape[-1]:
        return None
    mine = torch.stack(list(own), 1).sort(-1).values
    theirs = torch.as_tensor(experts).long().view(mine.shape).sort(-1).values
    return (mine != theirs).any(-1).sum(-1)

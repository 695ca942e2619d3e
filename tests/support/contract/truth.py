"""The distribution that a sampler should have drawn from, from a float32 forward pass. Imports nothing from trustrl."""

from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

BOUNDARY = 1e-5
"""Mass by which rounding may move an id over the edge of a truncation."""


@lru_cache
def model_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if (Path(folder) / "int8_activations").exists():
        for name, layer in model.named_modules():
            if "proj" in name:
                layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    return model


def rounded(x):
    """Activations on the 255 values of an int8 with one scale per token."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round() * scale


@torch.no_grad()
def logits_of(folder, prompt, tokens):
    """(T, V): what the model says of each token, in float64."""
    sequence = torch.tensor([[*prompt, *tokens]])
    return model_of(str(folder))(input_ids=sequence).logits[0, len(prompt) - 1 : -1].double()


def distribution(logits, parameters, order):
    """(T, V) log μ with −inf at removed ids, and a mask of the ids that rounding may remove or keep.

    `order` is the order in which the sampler truncates.
    """
    temperature = parameters.get("temperature", 1.0)
    logits = logits / (temperature or 1.0)
    unclear = torch.zeros_like(logits, dtype=torch.bool)
    if temperature == 0:
        return torch.log_softmax(logits, -1), unclear
    for name in order:
        value = parameters.get(name)
        if value is not None:
            logits, near = TRUNCATIONS[name](logits, value)
            unclear |= near
    return torch.log_softmax(logits, -1), unclear


def _top_p(logits, p):
    probs, ids = torch.softmax(logits, -1).sort(-1, descending=True)
    before = probs.cumsum(-1) - probs  # the mass of more probable ids
    removed, near = before >= p, (before - p).abs() < BOUNDARY
    return _removed(logits, torch.zeros_like(removed).scatter(-1, ids, removed)), near.new_zeros(near.shape).scatter(
        -1, ids, near
    )


def _top_k(logits, k):
    smallest = logits.topk(k).values[..., -1:]
    return _removed(logits, logits < smallest), (logits - smallest).abs() < BOUNDARY


def _min_p(logits, p):
    probs = torch.softmax(logits, -1)
    least = p * probs.amax(-1, keepdim=True)
    return _removed(logits, probs < least), (probs - least).abs() < BOUNDARY


def _removed(logits, removed):
    return logits.masked_fill(removed, -torch.inf)


TRUNCATIONS = {"top_p": _top_p, "top_k": _top_k, "min_p": _min_p}

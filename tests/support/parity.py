"""One file of tensors for every engine: each must reach the file's verdicts and gradients through its own seam.

`parity.json` holds four small batches and, for every preset of sampled tokens, the factor M·w of each token by the
float64 oracle. An engine's test calls `check` for each name in `PRESETS` with a function that runs the engine's own entry
point. `python -m support.parity` (in tests/) writes the file again.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import trustrl
from support import oracle

FILE = Path(__file__).with_name("parity.json")
LARGEST_ERROR = 1e-6
"""Of the gradient, relative to its largest entry in the batch."""

DRIFT = {
    "kpop": 4.0, "dppo-minimal": 4.0, "dppo-binary-tv-scaling": 4.0, "dppo-binary-kl-scaling": 4.0,
    "dppo-binary-tv-capped": 4.0,
    "trm-sampled": 0.15, "flash-reinforce": 0.05, "gspo": 0.02,
}  # fmt: skip
"""Where 0.5, the usual distance of the policy from μ, would stop nothing or everything, or reach no cap."""

_NEEDS = {name: trustrl.preset(name).needs() for name in trustrl.presets()}
PRESETS = [name for name, needs in _NEEDS.items() if not (needs.topk or needs.full)]
PER_SEQUENCE = [name for name in PRESETS if _NEEDS[name].reduction is not None]
"""Presets whose gradient is defined for an average over sequences."""


class Batch(NamedTuple):
    """One micro-batch in float32, (rows, tokens)."""

    logp: torch.Tensor
    behavior_logp: torch.Tensor
    proximal_logp: torch.Tensor
    advantage: torch.Tensor
    """The same for all tokens of a row; one row has advantage 0."""
    in_loss: torch.Tensor
    """Rows begin with a token in the loss. One row has a single token, and one a gap."""


class Case(NamedTuple):
    """The batch of one preset, and the oracle's answer."""

    batch: Batch
    factors: torch.Tensor
    """(rows, tokens) M·w in float64: the gradient of a token's loss is −M·w·A times its factor in the average."""


def read(name):
    """The case of one preset."""
    stored = json.loads(FILE.read_text())
    expected = stored["presets"][name]
    fields = stored["batches"][expected["batch"]]
    batch = {key: torch.tensor(value) for key, value in fields.items()}
    return Case(Batch(**batch), torch.tensor(expected["factors"], dtype=torch.float64))


def check(name, gradient, weights, *, verdict=None):
    """Asserts that an engine's gradient by the policy's log-probs is the oracle's, and so is each token's verdict.

    Args:
        name: The preset.
        gradient: Function of the batch; its `logp` requires grad. Returns the gradient as (rows, tokens), through the
            engine's own entry point.
        weights: Function of the mask; returns the factor of each token in the engine's average, written by hand.
        verdict: Returns the tokens that the region kept, if the engine shows them; else they are read from the gradient.
    """
    case = read(name)
    batch = case.batch._replace(logp=case.batch.logp.clone().requires_grad_(True))
    found = gradient(batch).detach().double()
    wanted = -case.factors * batch.advantage.double() * weights(batch.in_loss).double()
    error = ((found - wanted).abs().max() / wanted.abs().max()).item()
    assert error <= LARGEST_ERROR, f"{name}: {error:.2e}"
    decided = batch.in_loss & (batch.advantage != 0)
    kept = found != 0 if verdict is None else verdict()
    assert torch.equal(kept[decided], (case.factors != 0)[decided]), name
    return error


def token_mean(in_loss):
    """Factors of a mean over the batch's tokens."""
    return in_loss.double() / in_loss.sum()


def sequence_mean(in_loss):
    """Factors of a mean over sequences of the means over their tokens."""
    return in_loss.double() / in_loss.sum(1, keepdim=True) / len(in_loss)


def _batch(drift):
    numbers = np.random.default_rng(17)
    rows, width = 6, 12
    behavior = -numbers.exponential(1.2, (rows, width)) - 0.01
    proximal = np.minimum(behavior + 0.05 * numbers.standard_normal((rows, width)), -1e-3)
    logp = np.minimum(behavior + drift * numbers.standard_normal((rows, width)), -1e-3)
    advantage = np.repeat(np.array([1.3, -0.7, 0.4, -1.9, 0.0, 0.8])[:, None], width, 1)
    in_loss = numbers.random((rows, width)) < 0.85
    in_loss[:, 0] = True
    in_loss[5, 1:] = False
    in_loss[0, 3:5] = False
    numbers = {"logp": logp, "behavior_logp": behavior, "proximal_logp": proximal, "advantage": advantage}
    return {name: x.astype(np.float32).tolist() for name, x in numbers.items()} | {"in_loss": in_loss.tolist()}


def contents():
    """What the file must hold, from the oracle alone."""
    batches = {str(drift): _batch(drift) for drift in (0.5, *sorted(set(DRIFT.values())))}
    presets = {}
    for name in PRESETS:
        which = str(DRIFT.get(name, 0.5))
        fields = {key: np.asarray(value, np.float64) for key, value in batches[which].items()}
        mask = fields["in_loss"].astype(bool)
        unread = np.zeros((*mask.shape, 1))
        case = oracle.Case(
            fields["behavior_logp"], fields["logp"], fields["advantage"], mask, fields["proximal_logp"],
            unread, unread, mask, 0,
        )  # fmt: skip
        presets[name] = {"batch": which, "factors": oracle.factors(name, case).tolist()}
    return {"batches": batches, "presets": presets}


if __name__ == "__main__":
    FILE.write_text(json.dumps(contents(), separators=(",", ":")).replace('],"', '],\n"').replace("},", "},\n") + "\n")

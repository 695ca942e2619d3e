"""The one-time check of the Triton steps on the user's own first micro-batch: a wrong kernel must not train.

Once per process and kind of request, both implementations run on the whole micro-batch and must agree. This is the only
time that they wait for the device. If they differ, or if a kernel cannot be compiled, the process warns and uses the
eager steps from then on.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.config.terms import Reduction
from trustrl.core.diagnostics import Sums
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.core.steps import EAGER, VARIABLE, Steps
from trustrl.errors import TrustRLWarning

Run = Callable[[Steps, PolicyTokens], tuple[Tensor, Tensor, Sums]]
"""(steps, policy) → (loss, keep, sums)."""

RELATIVE = 1e-9
"""Largest relative difference of a float64 sum. Exponentials differ by a few units in the last place of 1e-16."""

RELATIVE_LOSS = 1e-5
"""Largest difference of loss and gradient relative to the largest gradient: both are rounded to float32."""

_CHECKED: dict[Any, bool] = {}


def checked(
    steps: Steps, run: Run, policy: PolicyTokens, rollout: RolloutTokens, region: Region, reduction: Reduction
) -> Steps:
    """Returns the steps if they agree with the eager ones on this micro-batch, else the eager ones."""
    kind = (region.kind, region.needs(), type(reduction), policy.logp.dtype, policy.logp.device.type)
    columns = rollout.topk is not None, policy.tail_logp is not None, policy.entropy is not None
    key = (*kind, *columns, rollout.proximal_logp is not None)
    if key not in _CHECKED:
        _CHECKED[key] = not (why := _difference(steps, run, policy))
        if why:
            warnings.warn(
                f"The Triton kernels of the loss {why} for {region.kind} on {policy.logp.device.type}. The loss runs "
                "as torch operations instead, with the same results and more launches. Please report this with the "
                f"versions of torch and triton. {VARIABLE}=eager skips the check.",
                TrustRLWarning,
                stacklevel=3,
            )
    return steps if _CHECKED[key] else EAGER


def _difference(steps: Steps, run: Run, policy: PolicyTokens) -> str:
    """Returns an empty string if both implementations agree."""
    want, want_grads = _results(run, EAGER, policy)
    try:
        found, grads = _results(run, steps, policy)
    except Exception as error:  # whatever a compiler or a driver raises
        return f"failed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
    if not torch.equal(want[1], found[1]):
        return "decided differently from the eager loss"
    scale = max(float(x.abs().amax()) for x in (want[0].reshape(1), *want_grads))
    pairs = [(want[0], found[0]), *zip(want_grads, grads, strict=True)]
    if any(float((a - b).abs().amax()) > RELATIVE_LOSS * scale for a, b in pairs):
        return "gave another loss or gradient than the eager loss"
    return _different_sums(want[2], found[2])


def _different_sums(want: Sums, found: Sums) -> str:
    for a, b in ((want.added, found.added), (want.highest, found.highest)):
        if a.keys() != b.keys():
            return f"gave other sums than the eager loss ({sorted(a.keys() ^ b.keys())})"
        for name, x in a.items():
            relative = RELATIVE_LOSS if name.startswith("loss/") else RELATIVE
            if not torch.allclose(x, b[name], rtol=relative, atol=relative, equal_nan=True):
                return f"gave another sum than the eager loss ({name})"
    return ""


def _results(run: Run, steps: Steps, policy: PolicyTokens) -> tuple[tuple[Tensor, Tensor, Sums], list[Tensor]]:
    given = {name: getattr(policy, name) for name in ("logp", "topk_logp", "tail_logp")}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items() if x is not None}
    with torch.enable_grad():
        loss, keep, sums = run(steps, replace(policy, **leaves))
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return (loss.detach(), keep, sums), list(grads)

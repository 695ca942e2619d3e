"""The one-time check of Triton's loss on the user's own first micro-batch: a wrong kernel must not train.

Once per process and kind of request, both implementations run on the whole micro-batch and must agree. This is the only
time that they wait for the device. If they differ, or if a kernel cannot be compiled, the process warns and uses
`eager` from then on.
"""

import warnings
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.config.terms import Reduction
from trustrl.core.diagnostics import Sums
from trustrl.core.impl.choice import VARIABLE, Impl
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.errors import TrustRLWarning

RELATIVE = 1e-9
"""Largest relative difference of a float64 sum. Exponentials differ by a few units in the last place of 1e-16."""

RELATIVE_LOSS = 1e-5
"""Largest difference of loss and gradient relative to the largest gradient: both are rounded to float32."""

_CHECKED: dict[Any, bool] = {}


@runtime_checkable
class Loss(Protocol):
    """`policy_loss` with every argument of one call besides the policy and `impl`."""

    def __call__(self, policy: PolicyTokens, *, impl: Impl) -> Any:
        """Returns the `LossOutput`."""
        ...


def checked(
    impl: Impl, loss: Loss, policy: PolicyTokens, rollout: RolloutTokens, region: Region, reduction: Reduction
) -> Impl:
    """Returns the implementation if it agrees with "eager" on this micro-batch, else "eager"."""
    kind = (region.kind, region.needs(), type(reduction), policy.logp.dtype, policy.logp.device.type)
    columns = rollout.topk is not None, policy.tail_logp is not None, policy.entropy is not None
    key = (*kind, *columns, rollout.proximal_logp is not None)
    if key not in _CHECKED:
        _CHECKED[key] = not (why := _difference(impl, loss, policy))
        if why:
            warnings.warn(
                f"The Triton kernels of the loss {why} for {region.kind} on {policy.logp.device.type}. The loss runs "
                "as torch operations instead, with the same results and more launches. Please report this with the "
                f"versions of torch and triton. {VARIABLE}=eager skips the check.",
                TrustRLWarning,
                stacklevel=3,
            )
    return impl if _CHECKED[key] else "eager"


def _difference(impl: Impl, loss: Loss, policy: PolicyTokens) -> str:
    """Returns an empty string if both implementations agree."""
    want, want_grads = _results("eager", loss, policy)
    try:
        got, grads = _results(impl, loss, policy)
    except Exception as error:  # whatever a compiler or a driver raises
        return f"failed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
    if not torch.equal(want.keep, got.keep):
        return "decided differently from the eager loss"
    scale = max(float(x.abs().amax()) for x in (want.loss.reshape(1), *want_grads))
    pairs = [(want.loss, got.loss), *zip(want_grads, grads, strict=True)]
    if any(float((a - b).abs().amax()) > RELATIVE_LOSS * scale for a, b in pairs):
        return "gave another loss or gradient than the eager loss"
    return _different_sums(want.sums, got.sums)


def _different_sums(want: Sums, got: Sums) -> str:
    for a, b in ((want.added, got.added), (want.highest, got.highest)):
        if a.keys() != b.keys():
            return f"gave other sums than the eager loss ({sorted(a.keys() ^ b.keys())})"
        for name, x in a.items():
            relative = RELATIVE_LOSS if name.startswith("loss/") else RELATIVE
            if not torch.allclose(x, b[name], rtol=relative, atol=relative, equal_nan=True):
                return f"gave another sum than the eager loss ({name})"
    return ""


class _Results(NamedTuple):
    loss: Tensor
    keep: Tensor
    sums: Sums


def _results(impl: Impl, loss: Loss, policy: PolicyTokens) -> tuple[_Results, list[Tensor]]:
    """Returns the results and the gradients with respect to the policy's log-probs."""
    inputs = {name: getattr(policy, name) for name in ("logp", "topk_logp", "tail_logp")}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if x is not None}
    with torch.enable_grad():
        out = loss(replace(policy, **leaves), impl=impl)
        grads = torch.autograd.grad(out.loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return _Results(out.loss.detach(), out.decision.keep, out.sums), list(grads)

"""The implementation that a call of `policy_loss` runs.

`eager` is the definition. The others give the same verdicts and counts in fewer launches or fewer passes over memory.

A wrong kernel must not train, so Triton's loss is checked once per process and kind of request: both implementations
run on the user's own micro-batch and must agree. This is the only time that they wait for the device. If they differ,
or if a kernel cannot be compiled, the process warns and uses `eager` from then on.
"""

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from trustrl.config.axes import Needs, Region
from trustrl.config.terms import Reduction
from trustrl.config.validators import one_of
from trustrl.core.clean import CleanTokens, OnNonFinite
from trustrl.core.decision import Decision
from trustrl.core.diagnostics import Sums
from trustrl.core.impl import eager
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.errors import TrustRLWarning

Impl = Literal["auto", "eager", "triton", "compiled"]

VARIABLE = "TRUSTRL_LOSS_IMPL"
"""Environment variable that decides for every call with `impl="auto"`."""


@runtime_checkable
class Implementation(Protocol):
    """Functions of a module such as `eager`, which defines their results."""

    def clean(
        self, policy: PolicyTokens, rollout: RolloutTokens, needs: Needs, *, on_nonfinite: OnNonFinite
    ) -> CleanTokens:
        """Returns the tokens that the region decides on."""
        ...

    def decide(self, tokens: CleanTokens, region: Region) -> Decision:
        """Returns the region's decision."""
        ...

    def reduced_loss(self, decision: Decision, tokens: CleanTokens, reduction: Reduction) -> tuple[Tensor, Tensor]:
        """Returns the loss and the overflow flags."""
        ...

    def collect(
        self, tokens: CleanTokens, decision: Decision, overflow: Tensor, policy: PolicyTokens, terms: dict[str, Tensor]
    ) -> Sums:
        """Returns the sums of the micro-batch."""
        ...


def implementation(
    impl: Impl, policy: PolicyTokens, rollout: RolloutTokens, region: Region, needs: Needs
) -> Implementation:
    """Returns an implementation by name: `eager` where `compiled` does not cover the region."""
    if impl == "triton":
        from trustrl.core.impl import triton  # imported on use, because only this implementation needs triton

        return triton
    if impl == "compiled":
        from trustrl.core.impl import compiled

        if compiled.covers(policy, rollout, region, needs) and compiled.works():
            return compiled.Compiled(region)
    return eager


def resolved(impl: Impl, rollout: RolloutTokens) -> Impl:
    """Returns the implementation to run: for "auto", the variable's, or Triton on a GPU that has it."""
    one_of("impl", impl, get_args(Impl))
    if impl == "auto":
        named: Any = os.environ.get(VARIABLE, "auto")
        one_of(VARIABLE, named, get_args(Impl))
        impl = named
    if impl == "eager" or not rollout.in_loss.numel() or torch.compiler.is_compiling():
        return "eager"
    if impl != "auto":
        return impl
    return "triton" if launches_count(rollout.in_loss) and _has_triton() else "eager"


def launches_count(x: Tensor) -> bool:
    """Returns True on devices where the number of launches decides, and that Triton compiles for."""
    return x.device.type == "cuda"  # AMD's too


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


RELATIVE = 1e-9
"""Largest relative difference of a float64 sum. Exponentials differ by a few units in the last place of 1e-16."""

RELATIVE_LOSS = 1e-5
"""Largest difference of loss and gradient relative to the largest gradient: both are rounded to float32."""

_CHECKED: dict[Any, bool] = {}


def checked(
    impl: Impl,
    loss: Callable[..., Any],
    policy: PolicyTokens,
    rollout: RolloutTokens,
    region: Region,
    reduction: Reduction,
) -> Impl:
    """Returns the implementation if it agrees with "eager" on this micro-batch, else "eager".

    `loss` is `policy_loss` with every argument of the call besides the policy and `impl`.
    """
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


def _difference(impl: Impl, loss: Callable[..., Any], policy: PolicyTokens) -> str:
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


def _results(impl: Impl, loss: Callable[..., Any], policy: PolicyTokens) -> tuple[_Results, list[Tensor]]:
    """Returns the results and the gradients with respect to the policy's log-probs."""
    inputs = {name: getattr(policy, name) for name in ("logp", "topk_logp", "tail_logp")}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if x is not None}
    with torch.enable_grad():
        out = loss(replace(policy, **leaves), impl=impl)
        grads = torch.autograd.grad(out.loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return _Results(out.loss.detach(), out.decision.keep, out.sums), list(grads)

"""The implementation that a call of `policy_loss` runs.

`eager` is the definition. The others give the same verdicts and counts in fewer launches or fewer passes over memory.
"""

import functools
import importlib.util
import os
from typing import Any, Literal, Protocol, get_args, runtime_checkable

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

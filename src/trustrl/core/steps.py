"""The steps of `policy_loss` around the region's decision, and the choice between their implementations.

The eager steps are the definition. The others give the same verdicts and counts in fewer launches or fewer passes over
memory.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from trustrl.config.axes import Needs, Region
from trustrl.config.terms import Reduction
from trustrl.config.validators import one_of
from trustrl.core.clean import CleanTokens, OnNonFinite, clean_tokens
from trustrl.core.diagnostics import Sums, collect
from trustrl.core.losses import policy_terms
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.core.reductions import reduce_terms
from trustrl.core.regions.decision import Decision
from trustrl.core.regions.dispatch import decide

Impl = Literal["auto", "eager", "triton", "compiled"]

VARIABLE = "TRUSTRL_LOSS_IMPL"
"""Environment variable that decides for every call with `impl="auto"`."""


class Steps(NamedTuple):
    """One implementation of the three steps."""

    judge: Callable[[PolicyTokens, RolloutTokens, Region, Needs, OnNonFinite], tuple[CleanTokens, Decision]]
    """Clean tokens and the region's decision, as `clean_tokens` and `decide`."""

    reduced_loss: Callable[[Decision, CleanTokens, Reduction], tuple[Tensor, Tensor]]
    """The loss and the overflow flags, as `policy_terms` and `reduce_terms`."""

    collect: Callable[[CleanTokens, Decision, Tensor, PolicyTokens, dict[str, Tensor]], Sums]
    """The totals of a micro-batch, as `diagnostics.collect`."""


def _reduced_loss(decision: Decision, tokens: CleanTokens, reduction: Reduction) -> tuple[Tensor, Tensor]:
    term, overflow = policy_terms(decision, tokens)
    return reduce_terms(term, tokens, reduction), overflow


def _judged_by(clean: Callable[..., CleanTokens]) -> Callable[..., tuple[CleanTokens, Decision]]:
    def judge(
        policy: PolicyTokens, rollout: RolloutTokens, region: Region, needs: Needs, on_nonfinite: OnNonFinite
    ) -> tuple[CleanTokens, Decision]:
        tokens = clean(policy, rollout, needs, on_nonfinite=on_nonfinite)
        return tokens, decide(tokens, region)

    return judge


EAGER = Steps(_judged_by(clean_tokens), _reduced_loss, collect)


def steps_for(impl: Impl, policy: PolicyTokens, rollout: RolloutTokens, region: Region, needs: Needs) -> Steps:
    """Returns an implementation by name: the eager one where a compiled one does not cover the region."""
    if impl == "eager":
        return EAGER
    if impl == "compiled":
        from trustrl.core import compiled_steps

        if compiled_steps.covers(policy, rollout, region, needs) and compiled_steps.works():
            return EAGER._replace(judge=compiled_steps.judge)
        return EAGER
    from trustrl.core import triton_steps  # imported on use, because only these steps need triton

    return Steps(_judged_by(triton_steps.clean), triton_steps.reduced_loss, triton_steps.collect)


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


def launches_count(at: Tensor) -> bool:
    """Returns True on devices where the number of launches decides, and that Triton compiles for."""
    return at.device.type == "cuda"  # AMD's too


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None

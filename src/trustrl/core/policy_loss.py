"""`policy_loss`: the loss of a micro-batch under a trust region, and the sums its metrics are made from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.config.axes import Needs, Region
from trustrl.config.terms import Penalty, Reduction, SequenceMeanTokenMean, TokenWeights
from trustrl.config.validators import one_of
from trustrl.core.clean import OnNonFinite
from trustrl.core.decision import Decision
from trustrl.core.diagnostics import Sums, raise_on_faults
from trustrl.core.impl.choice import Impl, checked, implementation, resolved
from trustrl.core.losses import penalty_terms, reduce_terms
from trustrl.core.records import PolicyTokens, RolloutTokens, differentiable_once
from trustrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Result of `policy_loss`."""

    loss: Float[Tensor, ""]
    """Sum of all reduced terms. Call `.backward()` on it. A second derivative raises: coefficients are detached."""

    terms: dict[str, Float[Tensor, ""]]
    """Each reduced term by name, detached: `policy`, and one for each penalty."""

    decision: Decision
    """The region's decision, in the shape of the batch."""

    _pending: list[Callable[[], Sums]] = field(repr=False)
    # torch.compile cannot trace a subscripted factory such as dict[str, Tensor].
    _made: list[Sums] = field(default_factory=list, repr=False)  # pyright: ignore[reportUnknownVariableType]

    @property
    def sums(self) -> Sums:
        """Sums that `rates` turns into metrics. Add them over micro-batches and ranks first.

        Computed on first access, so a step that logs nothing pays nothing. Until then the output keeps the
        micro-batch's tokens alive.
        """
        if self._pending:  # not functools.cached_property, which cannot be compiled
            self._made.append(self._pending.pop()())
        return self._made[0]


def policy_loss(
    policy: PolicyTokens,
    rollout: RolloutTokens,
    region: Region,
    *,
    reduction: Reduction,
    penalties: Sequence[Penalty] = (),
    on_nonfinite: OnNonFinite = "drop",
    impl: Impl = "auto",
) -> LossOutput:
    """Computes the loss of one micro-batch under a trust region.

    Counts in `reduction` are global, so the losses and gradients of micro-batches and ranks add up to those of the
    whole batch. A trainer that averages gradients over ranks multiplies the loss by the number of ranks, as for any
    loss.

    Args:
        policy: The policy's log-probs, with gradient.
        rollout: The sampled tokens and their log-probs, without gradient.
        region: Settings of a region, from `trustrl.preset` or built directly.
        reduction: Reduction from token terms to one number.
        penalties: Additional terms, each logged under its own name.
        on_nonfinite: Handling of tokens in the loss whose values are NaN, infinite or impossible. `drop` removes the
            token. `zero` removes it from the loss, but counts it in its sequence as unmoved. `raise` raises. All three
            count such tokens; only `raise` waits for the device.
        impl: "eager" runs every step as torch operations. "triton" runs cleaning, terms and sums in one launch each,
            with the same results. "auto" is "triton" on a GPU if `triton` is installed and agrees with "eager" on the
            first micro-batch, else "eager". "compiled" sums the recorded columns of DPPO and TROLL on a CPU in one loop
            that `torch.compile` makes, with the same verdicts, and is "eager" elsewhere. It compiles for some seconds,
            so "auto" never chooses it. The environment variable TRUSTRL_LOSS_IMPL decides for "auto".

    Returns:
        The loss, its terms, the region's decision and the sums for metrics.

    Raises:
        RecordError: If the records do not fit each other.
        MissingDataError: If the records lack data that the region needs.
        ConfigError: If the region cannot be combined with this reduction.
        NonFiniteError: If a token is faulty and `on_nonfinite="raise"`.

    Examples:
        >>> logp = torch.tensor([[-0.5, -1.0]], requires_grad=True)
        >>> rollout = RolloutTokens(
        ...     behavior_logp=torch.tensor([[-0.5, -2.5]]),
        ...     advantage=torch.tensor([1.0]),
        ...     in_loss=torch.tensor([[True, True]]),
        ... )
        >>> from trustrl.regions.dppo import DPPO
        >>> from trustrl.config.terms import TokenMean
        >>> policy_loss(PolicyTokens(logp=logp), rollout, DPPO(), reduction=TokenMean(num_tokens=2)).loss.backward()
        >>> logp.grad  # the second token rose from 0.08 to 0.37 and would rise further: masked
        tensor([[-0.5000, -0.0000]])
    """
    one_of("on_nonfinite", on_nonfinite, ("drop", "zero", "raise"))
    needs = needs_of_call(region, reduction)
    _check_kinds(penalties)
    name = resolved(impl, rollout)
    if name == "triton" != impl:  # nobody asked for it by name
        same: Any = {"rollout": rollout, "region": region, "reduction": reduction, "penalties": penalties}
        again = partial(policy_loss, **same, on_nonfinite="drop" if on_nonfinite == "raise" else on_nonfinite)
        name = checked(name, again, policy, rollout, region, reduction)
    steps = implementation(name, policy, rollout, region, needs)

    policy = differentiable_once(policy)
    tokens = steps.clean(policy, rollout, needs, on_nonfinite=on_nonfinite)
    decision = steps.decide(tokens, region)
    loss, overflow = steps.reduced_loss(decision, tokens, reduction)
    terms = {"policy": loss.detach()}
    for penalty in penalties:
        term, broken = penalty_terms(penalty, policy, rollout, tokens, decision.keep)
        tokens.faults[f"penalty_{penalty.kind}"] = broken.sum(dtype=tokens.log_ratio.dtype)
        reduced = reduce_terms(term, tokens, reduction)
        loss, terms[penalty.kind] = loss + reduced, reduced.detach()

    def sums() -> Sums:
        with torch.no_grad():
            return steps.collect(tokens, decision, overflow, policy, terms)

    out = LossOutput(loss, terms, _batched(decision, rollout), [sums])
    if on_nonfinite == "raise":
        raise_on_faults(out.sums)
    return out


def needs_of_call(region: Region, reduction: Reduction) -> Needs:
    """Returns the data that a call needs: the region's needs, and those of the reduction."""
    # Callers may run without a type checker.
    if not isinstance(region, Region):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"region must be a trustrl region such as trustrl.regions.DPPO(), got {region!r}. See trustrl.presets()."
        )
    if not isinstance(reduction, Reduction):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"reduction must be a trustrl reduction such as trustrl.TokenMean, got {reduction!r}.")
    needs = region.needs()
    kind = reduction.like or TokenWeights if isinstance(reduction, TokenWeights) else type(reduction)
    if needs.reduction is not None and kind is not needs.reduction:
        raise ConfigError(
            f"reduction must be {needs.reduction.__name__} with {region.kind}, got {kind.__name__}. "
            "The region's gradient is defined for that reduction; another one is another algorithm."
        )
    return replace(needs, sequences=True) if isinstance(reduction, SequenceMeanTokenMean) else needs


def _check_kinds(penalties: Sequence[Penalty]) -> None:
    """Raises if two terms would have the same name."""
    kinds = ["policy", *(penalty.kind for penalty in penalties)]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is not None:
        raise ConfigError(f"penalties must contain each kind once, got {twice!r} twice. Add up their coefficients.")


def _batched(decision: Decision, rollout: RolloutTokens) -> Decision:
    """Returns the flat decision in the shape of the batch, detached."""
    shape = rollout.in_loss.shape

    def back(x: Any) -> Any:
        return x.detach().reshape(shape) if isinstance(x, Tensor) else x

    interval = decision.divergence
    return replace(
        decision,
        **{
            name: back(getattr(decision, name))
            for name in ("keep", "weight", "logp", "value", "penalty", "max_increase", "max_decrease", "side")
        },
        divergence=None if interval is None else type(interval)(*(end.reshape(shape) for end in interval)),
        extra={name: back(x) for name, x in decision.extra.items()},
    )

"""The one call a trainer makes: tokens in, a loss and sums out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.build import decide
from trustrl.config.axes import Needs, Region
from trustrl.config.checks import one_of
from trustrl.config.terms import Penalty, Reduction, SequenceMeanTokenMean, TokenWeights
from trustrl.diagnostics import Sums, collect, raise_on_faults
from trustrl.errors import ConfigError
from trustrl.losses import penalty_terms, policy_terms
from trustrl.records import PolicyTokens, RolloutTokens
from trustrl.reductions import reduce_terms
from trustrl.regions.decision import Decision
from trustrl.tokens import OnNonFinite, clean_tokens


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What `policy_loss` returns."""

    loss: Float[Tensor, ""]
    """The sum of all terms, reduced; call `.backward()` on it."""

    terms: dict[str, Float[Tensor, ""]]
    """Each term by name, detached: `policy`, and one per penalty."""

    decision: Decision
    """The region's verdict, in the batch's own shape."""

    _pending: list[Callable[[], Sums]] = field(repr=False)
    _made: list[Sums] = field(default_factory=list, repr=False)

    @property
    def sums(self) -> Sums:
        """What `rates` turns into metrics; add them over micro-batches and ranks first.

        Made when first asked for: a step that logs nothing pays nothing for them. Until then the micro-batch's tokens
        are kept.
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
) -> LossOutput:
    """The loss of one micro-batch under a trust region.

    Counts in `reduction` are global, so losses and gradients of micro-batches and ranks add up to those of the whole
    batch. (A trainer that averages gradients over ranks multiplies by their number, as for any loss.)

    Args:
        policy: The policy's side, with gradient.
        rollout: The sampler's side.
        region: A region's settings, from `trustrl.preset` or built directly.
        reduction: How token terms become one number.
        penalties: Separate terms, each logged under its own name.
        on_nonfinite: What happens to a token in the loss whose values are NaN, infinite or impossible: `drop` it,
            `zero` it (it still counts in its sequence as unmoved), or `raise`. All are counted; only `raise` waits for
            the device.

    Raises:
        RecordError: the records do not fit each other; MissingDataError if the region needs more than they carry.
        ConfigError: the region cannot be combined with this reduction.
        NonFiniteError: with `on_nonfinite="raise"`.

    Examples:
        >>> logp = torch.tensor([[-0.5, -1.0]], requires_grad=True)
        >>> rollout = RolloutTokens(
        ...     behavior_logp=torch.tensor([[-0.5, -2.5]]),
        ...     advantage=torch.tensor([1.0]),
        ...     in_loss=torch.tensor([[True, True]]),
        ... )
        >>> from trustrl.config.regions import DPPO
        >>> from trustrl.config.terms import TokenMean
        >>> policy_loss(PolicyTokens(logp=logp), rollout, DPPO(), reduction=TokenMean(num_tokens=2)).loss.backward()
        >>> logp.grad  # the second token rose from .08 to .37 and is still pushed up: stopped
        tensor([[-0.5000, -0.0000]])
    """
    one_of("on_nonfinite", on_nonfinite, ("drop", "zero", "raise"))
    needs = _needs(region, reduction)
    tokens = clean_tokens(policy, rollout, needs, on_nonfinite=on_nonfinite)
    decision = decide(tokens, region)
    term, overflow = policy_terms(decision, tokens)
    loss = reduce_terms(term, tokens, reduction)
    terms = {"policy": loss.detach()}
    for penalty in penalties:
        if penalty.kind in terms:
            raise ConfigError(f"penalties must name each kind once, got {penalty.kind!r} twice. Add the coefficients.")
        extra, broken = penalty_terms(penalty, policy, rollout, tokens, decision.keep)
        reduced = reduce_terms(extra, tokens, reduction)
        terms[penalty.kind] = reduced.detach()
        tokens.faults[f"penalty_{penalty.kind}"] = broken.sum(dtype=tokens.log_ratio.dtype)
        loss = loss + reduced

    def sums() -> Sums:
        with torch.no_grad():
            return collect(tokens, decision, overflow, policy, rollout, terms)

    out = LossOutput(loss, terms, _batched(decision, rollout), [sums])
    if on_nonfinite == "raise":
        raise_on_faults(out.sums)
    return out


def _needs(region: Region, reduction: Reduction) -> Needs:
    if not isinstance(region, Region):
        raise ConfigError(
            f"region must be a trustrl region such as trustrl.DPPO(), got {region!r}. See trustrl.presets()."
        )
    if not isinstance(reduction, Reduction):
        raise ConfigError(
            f"reduction must be one of trustrl's reductions such as trustrl.TokenMean, got {reduction!r}."
        )
    needs = region.needs()
    amounts_to = reduction.like or TokenWeights if isinstance(reduction, TokenWeights) else type(reduction)
    if needs.reduction is not None and amounts_to is not needs.reduction:
        raise ConfigError(
            f"reduction must be {needs.reduction.__name__} with {region.kind}, got {amounts_to.__name__}. "
            "Its gradient is defined per sequence: any other average is another algorithm."
        )
    return replace(needs, sequences=True) if isinstance(reduction, SequenceMeanTokenMean) else needs


def _batched(decision: Decision, rollout: RolloutTokens) -> Decision:
    """The flat decision in the shape of the batch, detached."""
    shape = rollout.in_loss.shape

    def back(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().reshape(shape)

    interval = decision.divergence
    return replace(
        decision,
        **{name: back(getattr(decision, name)) for name in ("keep", "weight", "logp", "value", "penalty", "side")},
        divergence=None if interval is None else type(interval)(*(end.reshape(shape) for end in interval)),
        extra={name: back(x) for name, x in decision.extra.items()},
    )

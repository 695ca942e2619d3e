"""Context that a worker passes to its policy loss in addition to verl's own arguments."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trustrl.config.axes import Region
from trustrl.core.policy_loss import LossOutput
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.engines.common.token_places import TokenPlaces


@dataclass(frozen=True, slots=True)
class LossContext:
    """The inputs of one micro-batch's loss that verl does not pass, and the receiver of its results."""

    region: Region
    anchors: dict[str, Tensor]
    """`behavior_logp` and `proximal_logp` of the tokens, as far as they are known."""

    receive: Callable[[LossOutput, PolicyTokens, RolloutTokens, Tensor], None]
    """Called with the result, the tokens, and the factor that verl multiplies each token's loss by."""

    rollout: dict[str, Any] = field(default_factory=dict)
    """Further fields of `RolloutTokens`."""

    policy: dict[str, Any] = field(default_factory=dict)
    """Further fields of `PolicyTokens`."""

    policy_is_proximal: bool = False
    """True in the first update of a batch if π' is taken from its own forward pass."""

    tokens: TokenPlaces | None = None
    """The N tokens in verl's (B, R) arguments that the other fields are for; None for all B · R."""


_CURRENT: ContextVar[LossContext | None] = ContextVar("loss_context", default=None)


def current() -> LossContext | None:
    """Returns the context of the running loss, or None outside `RegionWorker`."""
    return _CURRENT.get()


@contextmanager
def active(context: LossContext) -> Iterator[None]:
    """Makes policy losses use this context while active."""
    before = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(before)

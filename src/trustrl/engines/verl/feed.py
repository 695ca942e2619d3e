"""What a worker knows beside the few tensors that verl hands to its policy losses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trustrl.config.axes import Region
from trustrl.objective import LossOutput
from trustrl.records import PolicyTokens, RolloutTokens


@dataclass(frozen=True, slots=True)
class Feed:
    """For one micro-batch: both anchors, more of the vocabulary, and who takes the sums."""

    region: Region
    anchors: dict[str, Tensor]
    """`behavior_logp` and `proximal_logp`, (B, R), those that are known."""

    take: Callable[[LossOutput, PolicyTokens, RolloutTokens, Tensor], None]
    """Called with the result, the tokens and what verl multiplies each token's loss with."""

    rollout: dict[str, Any] = field(default_factory=dict)
    """More fields of `RolloutTokens`."""

    policy: dict[str, Any] = field(default_factory=dict)
    """More fields of `PolicyTokens`."""


_NOW: ContextVar[Feed | None] = ContextVar("feed", default=None)


def current() -> Feed | None:
    """The feed of the micro-batch whose loss is being computed, if a worker of ours computes it."""
    return _NOW.get()


@contextmanager
def feeding(feed: Feed) -> Iterator[None]:
    """Inside, losses get this feed."""
    before = _NOW.set(feed)
    try:
        yield
    finally:
        _NOW.reset(before)

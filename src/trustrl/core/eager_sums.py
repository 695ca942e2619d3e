"""Sums over tokens as torch operations.

Written by `python scripts/sums.py` from `trustrl.core.sum_table`: change the rows there.
"""
# fmt: off
# ruff: noqa

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class SumInputs(NamedTuple):
    """Columns of the table, flat. Without an optional column, the sums that need it are left out."""

    in_loss: Tensor
    usable: Tensor
    overflow: Tensor
    keep: Tensor
    advantage: Tensor
    log_policy: Tensor
    log_anchor: Tensor
    log_ratio: Tensor
    weight: Tensor
    side: Tensor | None
    lower: Tensor | None
    upper: Tensor | None
    tail_anchor: Tensor | None
    tail_policy: Tensor | None
    entropy: Tensor | None
    mismatch: Tensor | None
    staleness: Tensor | None
    max_increase: Tensor | None
    max_decrease: Tensor | None
    bounded: bool
    around_sampler: bool


@runtime_checkable
class Accumulator(Protocol):
    """Receiver of the values of each row."""

    def count(self, name: str, x: Tensor) -> None: ...
    def count_all(self, name: str, x: Tensor) -> None: ...
    def same(self, name: str, other: str) -> None: ...
    def sum(self, name: str, x: Tensor) -> None: ...
    def max(self, name: str, x: Tensor) -> None: ...
    def histogram(self, name: str, x: Tensor) -> None: ...
    def binned(self, name: str, x: Tensor, masked: Tensor, gap: Tensor) -> None: ...


def add_up(totals: Accumulator, x: SumInputs, *, LARGEST_LOG_RATIO: float, LARGEST_EXPONENT: float, LARGEST_WEIGHT: float) -> None:
    """Adds every row whose columns are there."""
    totals.count_all("tokens", x.in_loss)
    totals.count_all("fault/overflow", x.overflow)
    totals.count_all("measured", x.usable)
    totals.count("used", ~x.overflow)
    totals.count("signed", x.advantage != 0)
    masked = ~x.keep & (x.advantage != 0)
    totals.count("masked", masked)
    direction = x.log_ratio if x.side is None else x.side
    totals.count("masked/increase", masked & (direction > 0))
    totals.count("masked/decrease", masked & (direction < 0))
    anchor = torch.exp(x.log_anchor)
    gap = torch.exp(x.log_policy) - anchor
    totals.count("bad_updates", (x.advantage < 0) & (gap <= -0.5))
    totals.sum("gap", gap)
    totals.sum("gap/abs", gap.abs())
    totals.sum("anchor/masked", torch.where(masked, anchor, 0.0))
    totals.max("max/gap", gap)
    totals.max("min/gap", -gap)
    totals.histogram("histogram/gap", gap)
    held = x.log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio = torch.exp(held.clamp(max=LARGEST_EXPONENT))
    totals.sum("ratio", ratio)
    totals.sum("ratio/square", ratio * ratio)
    totals.sum("log_ratio", held)
    totals.sum("log_ratio/square", held * held)
    totals.max("max/log_ratio", x.log_ratio)
    totals.histogram("histogram/log_ratio", x.log_ratio)
    acting = (x.usable & ~x.overflow) & x.keep
    totals.count_all("acting", acting)
    totals.sum("weight", torch.where(acting, x.weight, 0.0).clamp(-LARGEST_WEIGHT, LARGEST_WEIGHT))
    if x.lower is not None:
        totals.sum("divergence", torch.nan_to_num(x.lower, posinf=0.0))
        totals.count("divergence/finite", x.lower < torch.inf)
        totals.count("divergence/infinite", x.lower == torch.inf)
        totals.max("max/divergence", x.lower)
        totals.histogram("histogram/divergence", x.lower)
        if x.upper is not None:
            totals.sum("divergence/upper", torch.nan_to_num(x.upper, posinf=0.0))
            totals.count("divergence/upper_finite", x.upper < torch.inf)
            totals.histogram("histogram/divergence_upper", x.upper)
        if x.bounded:
            totals.count("bounded", x.lower >= 0)
            if x.max_increase is not None:
                if x.max_decrease is not None:
                    high = x.lower if x.upper is None else x.upper
                    bound = torch.where(direction > 0, x.max_increase, x.max_decrease)
                    totals.count("undecided", (x.lower <= bound) & (bound < high))
    if x.tail_anchor is not None:
        if x.tail_policy is not None:
            totals.sum("tail/anchor", torch.where(x.usable, x.tail_anchor, 0.0))
            totals.sum("tail/policy", torch.where(x.usable, x.tail_policy, 0.0))
            totals.same("tail/measured", "measured")
    if x.entropy is not None:
        seen = x.entropy.isfinite()
        spread = torch.where(x.usable & seen, x.entropy, 0.0)
        totals.sum("entropy/kept", torch.where(masked, 0.0, spread))
        totals.count("entropy/kept_measured", seen & ~masked)
        totals.sum("entropy/masked", torch.where(masked, spread, 0.0))
        totals.count("entropy/masked_measured", seen & masked)
    if x.mismatch is not None:
        both = ~x.mismatch.isnan()
        totals.count("mismatch/measured", both)
        log_k = torch.where(both, x.mismatch, 0.0)
        totals.sum("mismatch", torch.exp(log_k.clamp(max=LARGEST_EXPONENT)) * both)
        totals.sum("mismatch/abs", log_k.abs())
        other = torch.exp(x.log_anchor + (log_k if x.around_sampler else -log_k))
        totals.sum("mismatch/gap", (other - anchor).abs())
        totals.max("max/mismatch", torch.where(both, x.mismatch, -torch.inf))
        totals.max("min/mismatch", torch.where(both, -x.mismatch, -torch.inf))
    totals.binned("by_probability", anchor, masked, gap)
    if x.staleness is not None:
        totals.sum("staleness", x.staleness)
        totals.max("max/staleness", x.staleness)
        totals.same("staleness/measured", "measured")
        totals.binned("by_staleness", x.staleness, masked, gap)

"""Measures a statistic on clean tokens: from settings to an interval for each token."""

from collections.abc import Callable

import torch
from torch import Tensor

from trustrl.config.statistics import (
    BinaryKL,
    BinaryTV,
    Divergence,
    FullKL,
    FullTV,
    LogRatio,
    Ratio,
    SampledK2,
    SampledK3,
    SequenceRatio,
    Statistic,
    SymmetricBinaryKL,
    TopKKL,
    TopKTV,
)
from trustrl.core.clean import CleanTokens
from trustrl.core.divergences.full import full_kl, full_tv
from trustrl.core.divergences.interval import Interval, point
from trustrl.core.divergences.sampled import binary_kl, binary_tv, k2, k3, ratio_gap, symmetric_binary_kl
from trustrl.core.divergences.topk import topk_kl, topk_tv
from trustrl.core.partition import Partition
from trustrl.core.sequences import sequence_mean
from trustrl.errors import ConfigError, MissingDataError


def measure(tokens: CleanTokens, statistic: Statistic) -> Interval:
    """Returns the statistic of each token as an interval."""
    match statistic:
        case Ratio():
            return ratio_gap(tokens.log_ratio, torch.zeros_like(tokens.log_ratio))
        case LogRatio():
            return point(tokens.log_ratio.abs())
        case SequenceRatio():
            return point(torch.expm1(sequence_mean(tokens.log_ratio, tokens.counted, tokens.grouped)).abs())
        case SampledK2():
            return point(k2(tokens.log_ratio))
        case SampledK3():
            return point(k3(tokens.log_ratio))
        case BinaryTV():
            return binary_tv(tokens.log_policy, tokens.log_anchor)
        case BinaryKL():
            return binary_kl(tokens.log_policy, tokens.log_anchor, resolution=tokens.resolution)
        case SymmetricBinaryKL():
            return symmetric_binary_kl(tokens.log_policy, tokens.log_anchor, resolution=tokens.resolution)
        case TopKTV() | TopKKL():
            of = topk_tv if isinstance(statistic, TopKTV) else topk_kl
            assert tokens.partition is not None  # among the region's needs
            return _blanked(tokens, of(tokens.partition, tokens.log_policy, tokens.log_anchor))
        case FullTV() | FullKL():
            return _blanked(tokens, _full(tokens, statistic))
        case _:
            raise ConfigError(f"Cannot measure {statistic!r}. Use one of trustrl's statistics, or register a region.")


def acting_end(interval: Interval, statistic: Statistic) -> Tensor:
    """Returns the end of the interval that the bound applies to: the lower one unless `act_on="upper"`."""
    return interval.upper if isinstance(statistic, Divergence) and statistic.act_on == "upper" else interval.lower


def each_end(interval: Interval, change: Callable[[Tensor], Tensor]) -> Interval:
    """Applies a function to both ends. A point stays a point."""
    lower = change(interval.lower)
    return Interval(lower, lower if interval.upper is interval.lower else change(interval.upper))


def _full(tokens: CleanTokens, statistic: FullTV | FullKL) -> Interval:
    name = "tv" if isinstance(statistic, FullTV) else "kl"
    if tokens.full_divergence is not None:
        divergence = getattr(tokens.full_divergence, name)
        if divergence is None:
            raise MissingDataError(f"PolicyTokens.full_divergence.{name} must be given for {statistic.kind}, got None.")
        return point(divergence)
    partition = tokens.partition
    assert isinstance(partition, Partition)  # among the region's needs
    return (full_tv if name == "tv" else full_kl)(partition.log_policy.detach(), partition.log_anchor)


def _blanked(tokens: CleanTokens, interval: Interval) -> Interval:
    """Sets the interval to 0 on unusable tokens, whose partition may hold anything."""
    return each_end(interval, lambda end: torch.where(tokens.usable, end, 0.0))

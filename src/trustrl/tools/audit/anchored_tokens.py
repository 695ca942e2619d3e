"""Recorded tokens relative to one anchor. Each measurement is made once and shared by all regions that read it.

The numbers are the engine's: float64 values, blanked as `clean_tokens` does, and the functions of `core.divergences`.
Three shortcuts leave the verdicts unchanged: nothing is blanked if all tokens are usable, comparisons with a bound are
cached, and the binary KL is computed only where a cheap upper bound on it exceeds the region's bound.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.config.axes import Needs
from trustrl.core.clean import possible
from trustrl.core.divergences import Interval, binary_kl, binary_tv, ratio_gap
from trustrl.core.partition import resolution_of

Measurement = Literal["tv", "kl", "ratio"]
End = Literal["lower", "upper"]

_RELATIVE, _ABSOLUTE = 1e-6, 1e-12
"""Distance below a bound that is far larger than the rounding of a KL."""


def usable_in(advantage: Float[Tensor, " n"], logps: Iterable[Float[Tensor, " n"]]) -> Bool[Tensor, " n"]:
    """Flags tokens with a finite advantage and possible log-probs, as `clean_tokens` does.

    Checks the extremes of each column first, which are NaN if any value is. Most records have no faults.
    """
    usable = torch.ones(len(advantage), dtype=torch.bool)
    if not all(x.abs() < torch.inf for x in advantage.aminmax()):
        usable &= advantage.abs() < torch.inf
    for logp in logps:
        if not all(possible(x) for x in logp.aminmax()):
            usable &= possible(logp)
    return usable


class AnchoredTokens:
    """Tokens of one piece relative to an anchor b, with r = π/b."""

    def __init__(self, columns: Mapping[str, Tensor], run: Int[Tensor, " n"], needs: Needs) -> None:
        raw = {name: columns[f"{name}_logp"].double() for name in ("policy", *sorted(needs.anchors))}
        advantage = columns["advantage"].double()
        usable = usable_in(advantage, raw.values())
        policy, anchor = raw["policy"], raw[needs.anchor]
        if not usable.all():
            policy, anchor, advantage = (torch.where(usable, x, 0.0) for x in (policy, anchor, advantage))
        self.usable, self.advantage, self.log_ratio = usable, advantage, policy - anchor
        self._log_policy, self._log_anchor = policy.clamp(max=0.0), anchor.clamp(max=0.0)
        self._resolution = resolution_of(columns["policy_logp"], columns[f"{needs.anchor}_logp"])
        self._run = run
        self._above: dict[tuple[Measurement, End, float], Tensor] = {}

    def above(self, what: Measurement, end: End, bound: float) -> Bool[Tensor, " n"]:
        """Flags tokens where this end of a measurement's interval exceeds the bound."""
        key = what, end, bound
        if key not in self._above:
            if what == "kl":
                self._above[key] = self._kl_above(end, bound)
            else:
                interval = self._tv if what == "tv" else self._ratio
                self._above[key] = getattr(interval, end) > bound
        return self._above[key]

    def interval(self, what: Measurement) -> Interval:
        """Returns the measurement of every token."""
        if what == "kl":
            return binary_kl(self._log_policy, self._log_anchor, resolution=self._resolution)
        return self._tv if what == "tv" else self._ratio

    def sequences_leaving(self, max_decrease: float, max_increase: float) -> Bool[Tensor, " n"]:
        """Flags tokens whose sequence's mean ratio is out of bounds and that the update pushes further out."""
        mean = self._sequence_means
        gap = ratio_gap(mean, mean.new_zeros(())).lower
        side = ((mean > 0) & (gap > max_increase)).byte() + 2 * ((mean < 0) & (gap > max_decrease)).byte()
        side = side.index_select(0, self._run)
        return ((self.advantage > 0) & (side == 1)) | ((self.advantage < 0) & (side == 2))

    def mean_log_ratio(self) -> Float[Tensor, " n"]:
        """Returns the mean log-ratio of each token's sequence."""
        return self._sequence_means.index_select(0, self._run)

    @cached_property
    def rises(self) -> Bool[Tensor, " n"]:
        """Tokens with r > 1."""
        return self.log_ratio > 0

    @cached_property
    def falls(self) -> Bool[Tensor, " n"]:
        """Tokens with r < 1."""
        return self.log_ratio < 0

    @cached_property
    def pushed_up(self) -> Bool[Tensor, " n"]:
        """Tokens with r > 1 and A > 0."""
        return (self.advantage > 0) & self.rises

    @cached_property
    def pushed_down(self) -> Bool[Tensor, " n"]:
        """Tokens with r < 1 and A < 0."""
        return (self.advantage < 0) & self.falls

    @cached_property
    def _sequence_means(self) -> Float[Tensor, " s"]:
        num = int(self._run[-1]) + 1
        total = self.log_ratio.new_zeros(num).index_add(0, self._run, self.log_ratio)
        return total / total.new_zeros(num).index_add(0, self._run, self.usable.double()).clamp(min=1.0)

    @cached_property
    def _tv(self) -> Interval:
        return binary_tv(self._log_policy, self._log_anchor)

    @cached_property
    def _ratio(self) -> Interval:
        return ratio_gap(self.log_ratio, self.log_ratio.new_zeros(()))

    @cached_property
    def _gap_and_scale(self) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """(b − π)² and π·(1 − π). Their ratio is the χ² of the binary distributions, an upper bound on their KL."""
        policy = self._log_policy.exp()
        return self._tv.lower.square(), policy * (1 - policy).clamp(min=self._resolution)

    def _kl_above(self, end: End, bound: float) -> Bool[Tensor, " n"]:
        if end == "upper":  # infinite unless b = 1, where both ends are equal
            return self.above("kl", "lower", bound) | (self._log_anchor < 0 if bound < torch.inf else False)
        gap, scale = self._gap_and_scale
        surely = max(bound * (1 - _RELATIVE) - _ABSOLUTE, 0.0) / (1 + self._resolution)
        near = gap > scale * surely
        indices = near.nonzero().squeeze(1)
        policy, anchor = (x.index_select(0, indices) for x in (self._log_policy, self._log_anchor))
        near[indices] = binary_kl(policy, anchor, resolution=self._resolution).lower > bound
        return near

"""Replay of a region on recorded tokens: exact if the records contain everything it reads, bounded otherwise.

A record contains the policy's log-prob of the sampled token only. Regions that read no more are replayed with the
library's `decide`, so the verdict is exactly the engine's. A mask on a Top-K or full divergence is bounded: merging ids
only loses divergence, so

    binary ≤ top-K ≤ full ≤ the upper end,   top-K increasing with K

Measurements of the recorded region narrow these bounds further. The anchor's recorded top-K does not: with π known at
one id, the rest of its mass may lie where the anchor has none.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config.axes import AnchoredRegion, Needs, Region, TrustRegion, reads_ages
from trustrl.config.loading import config_from_dict
from trustrl.config.statistics import BinaryKL, BinaryTV, Divergence, FullKL, FullTV, TopKKL, TopKTV
from trustrl.core.clean import CleanTokens, clean_tokens
from trustrl.core.divergences import Interval
from trustrl.core.divergences.measure import measure
from trustrl.core.numerics import either
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.core.regions.dispatch import REGION_KINDS, decide
from trustrl.core.regions.dppo import leaving, outside
from trustrl.errors import TrustRLError
from trustrl.recording import Piece

How = Literal["replayed", "bounded", "left out"]

COLUMNS = (
    "step", "update", "sequence", "position", "token_id", "advantage", "behavior_logp", "proximal_logp", "policy_logp",
    "weight", "kept", "divergence_lower", "divergence_upper", "sampler_version",
)  # fmt: skip
"""Columns that verdicts and their counts read."""

_TV, _KL = (BinaryTV, TopKTV, FullTV), (BinaryKL, TopKKL, FullKL)


class Arm(NamedTuple):
    """A named region and how records can reproduce it."""

    name: str
    region: Region
    how: How
    reason: str
    """Reason that it is not replayed; empty if it is."""


class RegionVerdict(NamedTuple):
    """Verdict of one region on the tokens of a piece."""

    measured: Bool[Tensor, " n"]
    """Tokens without a fault that affects this region."""

    masked: Bool[Tensor, " n"]
    """Certainly masked."""

    may_mask: Bool[Tensor, " n"]
    """Possibly masked. Equal to `masked` if the region is replayed."""

    certified: tuple[Bool[Tensor, " n"], Bool[Tensor, " n"]] | None
    """Tokens whose full-vocabulary divergence is certainly outside the bound, and those certainly inside."""

    weight: Float[Tensor, " n"] | None
    """Weight w if the region is replayed, else None."""


def arm(name: str, region: Region) -> Arm:
    """Determines from a region's settings whether records can replay it, bound it, or neither."""
    needs = region.needs()
    if needs.projects:
        why = "projects the distribution: needs π at the anchor's top-K, which records do not contain"
        return Arm(name, region, "left out", why)
    if not (needs.topk or needs.full):
        return Arm(name, region, "replayed", "")
    if reads_ages(region):
        why = "needs the anchor's top-K and tokens' ages, so it is neither replayed nor bounded. Use its binary form"
        return Arm(name, region, "left out", why)
    what = "π over the whole vocabulary" if needs.full else f"π at the anchor's top {needs.topk}"
    if token_mask(region) is None:
        why = f"needs {what} and decides by sequence, so it is neither replayed nor bounded. Use its binary form"
        return Arm(name, region, "left out", why)
    return Arm(name, region, "bounded", f"needs {what}, which records do not contain")


def token_mask(region: Region) -> TrustRegion | None:
    """Returns the region on the shared axes if it masks single tokens by a TV or a KL, else None."""
    if not isinstance(region, AnchoredRegion):
        return None
    try:
        axes = region if isinstance(region, TrustRegion) else region.axes()
    except NotImplementedError:
        return None
    is_mask = axes.action == "mask" and axes.level == "token" and isinstance(axes.statistic, (*_TV, *_KL))
    return axes if is_mask else None


class Replay:
    """Tokens of one piece, as `policy_loss` received them."""

    def __init__(self, piece: Piece) -> None:
        columns = piece.columns
        self._columns = columns
        self._policy = PolicyTokens(logp=columns["policy_logp"])
        self._rollout = RolloutTokens(
            advantage=columns["advantage"],
            in_loss=torch.ones(len(piece), dtype=torch.bool),
            behavior_logp=columns.get("behavior_logp"),
            proximal_logp=columns.get("proximal_logp"),
            sequence_ids=piece.run,
        )
        self._measured = _measured_by(piece.region, columns)
        self._clean: dict[tuple[frozenset[str], str], CleanTokens] = {}

    def missing(self, region: Region) -> list[str]:
        """Returns the columns a region reads that are null in this piece."""
        wanted = [f"{anchor}_logp" for anchor in sorted(region.needs().anchors)]
        if reads_ages(region):
            wanted.append("sampler_version")
        return [name for name in wanted if name not in self._columns]

    def verdict(self, given: Arm) -> RegionVerdict | None:
        """Returns the region's verdict, or None if it is left out or a column it reads is null."""
        if given.how == "left out" or self.missing(given.region):
            return None
        tokens = self.tokens(given.region)
        axes = token_mask(given.region)
        certified = None if axes is None else self._certified(tokens, axes)
        if given.how == "replayed":
            decision = decide(tokens, given.region)
            return RegionVerdict(tokens.usable, ~decision.keep, ~decision.keep, certified, decision.weight)
        assert axes is not None
        statistic = axes.statistic
        assert isinstance(statistic, Divergence)
        lower, upper = self._interval(tokens, axes, _rank(statistic), statistic.act_on)
        return RegionVerdict(tokens.usable, _stops(tokens, axes, lower), _stops(tokens, axes, upper), certified, None)

    def tokens(self, region: Region) -> CleanTokens:
        """Returns clean tokens relative to the region's anchor, cached for all regions that share it."""
        needs = region.needs()
        key = needs.anchors, needs.anchor
        if key not in self._clean:
            reads = Needs(anchors=needs.anchors, anchor=needs.anchor, sequences=True)
            clean = clean_tokens(self._policy, self._rollout, reads)
            if "sampler_version" in self._columns:  # a piece may hold several steps, so ages are not one number's
                ages = (self._columns["step"] - self._columns["sampler_version"]).to(clean.log_ratio.dtype)
                clean = replace(clean, staleness=ages.where(clean.usable, 0.0))
            self._clean[key] = clean
        return self._clean[key]

    def _certified(self, tokens: CleanTokens, axes: TrustRegion) -> tuple[Tensor, Tensor]:
        assert axes.statistic is not None
        low, high = axes.statistic.bounds
        bound = either(tokens.log_ratio > 0, high, low, like=tokens.log_ratio)
        lower, upper = self._interval(tokens, axes, math.inf, "lower")
        return tokens.usable & (lower > bound), tokens.usable & (upper <= bound)

    def _interval(self, tokens: CleanTokens, axes: TrustRegion, rank: float, end: str) -> Interval:
        """Bounds the divergence over the anchor's top `rank` ids, or its upper end if `end` is "upper"."""
        is_tv = isinstance(axes.statistic, _TV)
        lower, upper = measure(tokens, BinaryTV() if is_tv else BinaryKL())
        found = self._measured
        if found is None or found.is_tv != is_tv or found.anchor != axes.anchor:
            return Interval(lower, upper)
        if rank >= found.rank or end == "upper":
            lower = torch.maximum(lower, found.below(found.lower))
        if rank <= found.rank and end == "lower":
            upper = torch.minimum(upper, found.above(found.lower))
        elif rank >= found.rank:
            upper = torch.minimum(upper, found.above(found.upper))
        return Interval(lower, upper)


class _Measured(NamedTuple):
    """Divergence that the recorded region measured at each token. With a top-K it exceeds the sampled token's."""

    is_tv: bool
    anchor: str
    rank: float
    lower: Tensor
    upper: Tensor

    @staticmethod
    def below(x: Tensor) -> Tensor:
        """Returns a lower bound on the number that was rounded to the recorded float32."""
        return torch.nextafter(x, x.new_full((), -torch.inf)).double()

    @staticmethod
    def above(x: Tensor) -> Tensor:
        """Returns an upper bound on the number that was rounded to the recorded float32."""
        return torch.nextafter(x, x.new_full((), torch.inf)).double()


def recorded_region(settings: Mapping[str, Any] | None) -> Region | None:
    """Returns the region a file was recorded with, or None if it has none or its kind is not registered here."""
    if settings is None:
        return None
    try:
        region = config_from_dict(settings)
    except (TrustRLError, TypeError):
        return None
    return region if isinstance(region, Region) and region.kind in REGION_KINDS else None


def _measured_by(settings: Mapping[str, Any] | None, columns: Mapping[str, Tensor]) -> _Measured | None:
    region = recorded_region(settings)
    axes = None if region is None else token_mask(region)
    if axes is None or "divergence_lower" not in columns or "divergence_upper" not in columns:
        return None
    rank = _rank(axes.statistic)
    if not rank:
        return None  # the sampled token has it in full precision
    ends = (
        columns[f"divergence_{end}"].nan_to_num(nan=0.0 if end == "lower" else torch.inf) for end in ("lower", "upper")
    )
    return _Measured(isinstance(axes.statistic, _TV), axes.anchor, rank, *ends)


def _rank(statistic: Any) -> float:
    """Returns the number of ids a divergence reads in addition to the sampled one. It grows with this number."""
    if isinstance(statistic, (FullTV, FullKL)):
        return math.inf
    return statistic.k if isinstance(statistic, (TopKTV, TopKKL)) else 0


def _stops(tokens: CleanTokens, axes: TrustRegion, distance: Tensor) -> Tensor:
    assert axes.statistic is not None
    low, high = axes.statistic.bounds
    if axes.direction == "symmetric":
        stop = outside(distance, tokens.log_ratio, max_increase=high, max_decrease=low)
    else:
        stop = leaving(distance, tokens.log_ratio, tokens.advantage, max_increase=high, max_decrease=low)
    return stop & (tokens.advantage != 0)

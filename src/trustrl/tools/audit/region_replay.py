"""Replay of a region on recorded tokens: exact if the records contain everything it reads, bounded otherwise.

A record contains the policy's log-prob of the sampled token only. Regions that read no more are replayed: with
the library's `decide`, or, if the verdict only compares a measurement with a bound, with the same comparison on
measurements that all regions share. Either way the verdict is exactly the engine's. A mask on a Top-K or full
divergence is bounded: merging ids only loses divergence, so

    binary ≤ top-K ≤ full ≤ the upper end,   top-K increasing with K

Measurements of the recorded region narrow these bounds further. The anchor's recorded top-K does not: with π known at
one id, the rest of its mass may lie where the anchor has none.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config.axes import Needs, Region, reads_ages
from trustrl.config.statistics import (
    Anchor,
    BinaryKL,
    BinaryTV,
    Divergence,
    FullKL,
    FullTV,
    Ratio,
    SequenceRatio,
    TopKKL,
    TopKTV,
)
from trustrl.core.clean import CleanTokens, clean_tokens
from trustrl.core.decision import decide, ratio_weight
from trustrl.core.divergences import Interval, tv_limit
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.core.sequences import Sequences
from trustrl.errors import TrustRLError
from trustrl.recording import Piece
from trustrl.regions.loading import config_from_dict
from trustrl.regions.trust_region import TrustRegion
from trustrl.tools.audit.anchored_tokens import AnchoredTokens, End, Measurement

How = Literal["replayed", "bounded", "left out"]

COLUMNS = (
    "step", "update", "sequence", "position", "token_id", "advantage", "behavior_logp", "proximal_logp", "policy_logp",
    "weight", "kept", "divergence_lower", "divergence_upper", "sampler_version",
)  # fmt: skip
"""Columns that verdicts and their counts read."""

Above = Callable[[float], Bool[Tensor, " n"]]
"""Returns the tokens above a bound."""

_MEASUREMENTS: dict[type, Measurement] = {Ratio: "ratio", BinaryTV: "tv", BinaryKL: "kl"}
_TV, _KL = (BinaryTV, TopKTV, FullTV), (BinaryKL, TopKKL, FullKL)


class Arm(NamedTuple):
    """A named region and how records can reproduce it."""

    name: str
    region: Region
    how: How
    reason: str
    """Reason that it is not replayed; empty if it is."""

    needs: Needs
    mask: TrustRegion | None
    """The region on the shared axes, if `token_mask` finds it there."""

    plain: TrustRegion | None
    """The region on the shared axes, if `plain_mask` finds it there."""


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

    weight: Callable[[], Float[Tensor, " n"]] | None
    """Returns the weight w if the region is replayed, else None."""


def arm(name: str, region: Region) -> Arm:
    """Determines from a region's settings whether records can replay it, bound it, or neither."""
    needs, mask = region.needs(), token_mask(region)
    how, why = _how(region, needs, mask)
    return Arm(name, region, how, why, needs, mask, plain_mask(region))


def _how(region: Region, needs: Needs, mask: TrustRegion | None) -> tuple[How, str]:
    if needs.projects:
        return "left out", "projects the distribution: needs π at the anchor's top-K, which records do not contain"
    if needs.whole_call:
        return "left out", "decides on all tokens of a micro-batch, and records do not contain its limits"
    if not (needs.topk or needs.full):
        return "replayed", ""
    if reads_ages(region):
        why = "needs the anchor's top-K and tokens' ages, so it is neither replayed nor bounded. Use its binary form"
        return "left out", why
    what = "π over the whole vocabulary" if needs.full else f"π at the anchor's top {needs.topk}"
    if mask is None:
        why = f"needs {what} and decides by sequence, so it is neither replayed nor bounded. Use its binary form"
        return "left out", why
    return "bounded", f"needs {what}, which records do not contain"


def token_mask(region: Region) -> TrustRegion | None:
    """Returns the region on the shared axes if it masks single tokens by a TV or a KL, else None."""
    axes = region.axes()
    if axes is None or axes.action != "mask" or axes.level != "token":
        return None
    return axes if isinstance(axes.statistic, (*_TV, *_KL)) else None


def plain_mask(region: Region) -> TrustRegion | None:
    """Returns the region on the shared axes if its verdict only compares a shared measurement with a bound, else None.

    Ages, and regions with rules that the shared axes do not cover, are left to the engine's `decide`.
    """
    axes = region.axes()
    if axes is None or reads_ages(region) or axes.action not in ("mask", "clip"):
        return None
    if isinstance(axes.statistic, SequenceRatio):
        return axes if axes.direction == "away" else None
    return axes if axes.level == "token" and type(axes.statistic) in _MEASUREMENTS else None


class Replay:
    """Tokens of one piece, as `policy_loss` received them."""

    def __init__(self, piece: Piece) -> None:
        self._columns, self._run = piece.columns, piece.run
        self.recorded = recorded_arm(piece.region)
        self._measured = None if self.recorded is None else _measured_by(self.recorded, piece.columns)
        self._clean: dict[tuple[frozenset[str], str], CleanTokens] = {}
        self._anchored: dict[tuple[frozenset[str], str], AnchoredTokens] = {}

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
        tokens = self._tokens(given.needs)
        certified = None if given.mask is None else self._certified(tokens, given.mask)
        if given.how == "replayed":
            masked, weight = self._replayed(tokens, given)
            return RegionVerdict(tokens.usable, masked, masked, certified, weight)
        axes = given.mask
        assert axes is not None
        statistic = axes.statistic
        assert isinstance(statistic, Divergence)
        masked, may_mask = (
            _stops(tokens, axes, above) for above in self._ends(tokens, axes, _rank(statistic), statistic.act_on)
        )
        return RegionVerdict(tokens.usable, masked, may_mask, certified, None)

    def tv(self, anchor: Anchor) -> tuple[AnchoredTokens, Interval]:
        """Returns the tokens relative to an anchor, and bounds on their TV over the whole vocabulary.

        A TV that the recorded region measured from this anchor narrows the bounds of the sampled token. A KL narrows
        the upper one, by Pinsker's inequality.
        """
        tokens = self._tokens(Needs(anchors=frozenset({anchor}), anchor=anchor))
        lower, upper = tokens.interval("tv")
        divergence = self._measured
        if divergence is not None and divergence.anchor == anchor:
            measured = divergence.above(divergence.upper)
            upper = torch.minimum(upper, measured if divergence.is_tv else tv_limit(measured))
            if divergence.is_tv:
                lower = torch.maximum(lower, divergence.below(divergence.lower))
        return tokens, Interval(torch.minimum(lower, upper), upper)

    def _replayed(self, tokens: AnchoredTokens, candidate: Arm) -> tuple[Tensor, Callable[[], Tensor]]:
        """Returns the tokens that the region masks, and a function that returns the weights."""
        axes = candidate.plain
        if axes is None:
            decision = decide(self._clean_tokens(candidate.needs), candidate.region)
            return ~decision.keep, lambda: decision.weight
        statistic = axes.statistic
        assert statistic is not None
        of_sequence = isinstance(statistic, SequenceRatio)
        if of_sequence:
            masked = tokens.sequences_leaving(*statistic.bounds)
        else:
            end: End = statistic.act_on if isinstance(statistic, Divergence) else "lower"
            masked = _stops(tokens, axes, partial(tokens.above, _MEASUREMENTS[type(statistic)], end))

        def weight() -> Tensor:
            if axes.correction is not None:
                return decide(self._clean_tokens(candidate.needs), candidate.region).weight
            log_ratio = tokens.mean_log_ratio() if of_sequence else tokens.log_ratio
            return ratio_weight(log_ratio, max_ratio=axes.max_ratio)

        return masked, weight

    def _clean_tokens(self, needs: Needs) -> CleanTokens:
        """Returns the tokens that decision functions read, cached for all regions with the same anchors."""
        key = needs.anchors, needs.anchor
        if key not in self._clean:
            columns, run = self._columns, self._run
            rollout = RolloutTokens(
                advantage=columns["advantage"],
                in_loss=torch.ones(len(run), dtype=torch.bool),
                behavior_logp=columns.get("behavior_logp"),
                proximal_logp=columns.get("proximal_logp"),
            )
            reads = Needs(anchors=needs.anchors, anchor=needs.anchor)
            clean = clean_tokens(PolicyTokens(logp=columns["policy_logp"]), rollout, reads)
            clean = replace(clean, sequences=Sequences(run, int(run[-1]) + 1, None))  # in order: no sort is needed
            if "sampler_version" in columns:  # a piece may hold several steps, so ages are not one number's
                ages = (columns["step"] - columns["sampler_version"]).to(clean.log_ratio.dtype)
                clean = replace(clean, staleness=ages.where(clean.usable, 0.0))
            self._clean[key] = clean
        return self._clean[key]

    def _tokens(self, needs: Needs) -> AnchoredTokens:
        key = needs.anchors, needs.anchor
        if key not in self._anchored:
            self._anchored[key] = AnchoredTokens(self._columns, self._run, needs)
        return self._anchored[key]

    def _certified(self, tokens: AnchoredTokens, axes: TrustRegion) -> tuple[Tensor, Tensor]:
        assert axes.statistic is not None
        low, high = axes.statistic.bounds
        outside, not_inside = (
            above(high) if low == high else torch.where(tokens.rises, above(high), above(low))
            for above in self._ends(tokens, axes, math.inf, "lower")
        )
        return tokens.usable & outside, tokens.usable & ~not_inside

    def _ends(self, tokens: AnchoredTokens, axes: TrustRegion, rank: float, end: str) -> tuple[Above, Above]:
        """Bounds the divergence over the anchor's top `rank` ids, or its upper end if `end` is "upper"."""
        is_tv = isinstance(axes.statistic, _TV)
        what: Measurement = "tv" if is_tv else "kl"
        divergence = self._measured
        if divergence is None or divergence.is_tv != is_tv or divergence.anchor != axes.anchor:
            return partial(tokens.above, what, "lower"), partial(tokens.above, what, "upper")
        lower, upper = tokens.interval(what)
        if rank >= divergence.rank or end == "upper":
            lower = torch.maximum(lower, divergence.below(divergence.lower))
        if rank <= divergence.rank and end == "lower":
            upper = torch.minimum(upper, divergence.above(divergence.lower))
        elif rank >= divergence.rank:
            upper = torch.minimum(upper, divergence.above(divergence.upper))
        return lower.gt, upper.gt


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


def recorded_arm(settings: Mapping[str, Any] | None) -> Arm | None:
    """Returns the region a file was recorded with, or None if it has none or its kind is not registered here."""
    return None if settings is None else _arm_of(json.dumps(settings, default=str))


@lru_cache
def _arm_of(settings: str) -> Arm | None:
    try:
        region = config_from_dict(json.loads(settings))
    except (TrustRLError, TypeError):
        return None
    return arm("recorded", region) if isinstance(region, Region) else None


def _measured_by(recorded: Arm, columns: Mapping[str, Tensor]) -> _Measured | None:
    axes = recorded.mask
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


def _stops(tokens: AnchoredTokens, axes: TrustRegion, above: Above) -> Tensor:
    """Flags tokens that a mask on a distance stops, like `leaving` and `outside`. Tokens with A = 0 are kept."""
    assert axes.statistic is not None
    low, high = axes.statistic.bounds
    if axes.direction == "away":
        return (tokens.pushed_up & above(high)) | (tokens.pushed_down & above(low))
    stop = above(max(low, high))
    if low != high:
        stop = torch.where(tokens.rises, above(high), torch.where(tokens.falls, above(low), stop))
    return stop & (tokens.advantage != 0)

"""Settings that most regions share, their checks, and the data that a statistic needs.

Every region:

- A missing log-prob of the anchor is an error. Nothing is put in its place.
- A token exactly at a bound is inside. Decisions are those of exact arithmetic on the input, in float64.
- A token with A = 0 is kept. It has no policy gradient and is on neither side of a mask.
- Masked tokens stay in the denominator. So do faulty ones (a log-prob that is NaN, infinite or above 0), which have no
  gradient and are counted, and those whose coefficient exceeds 3.4e31 in float32 (`trustrl/fault_overflow`).
- Weights are detached. Without an objective the value of the loss has no meaning: read the metrics.
- If the decision is per token, batches may be split anywhere. Regions over sequences need them whole in a call: rows of
  a (B, T) batch, or packed tokens with `sequence_ids`.
- A KL penalty and an entropy bonus act on masked tokens too, unless they have `only_kept=True`.
- Metrics of ratios, `trustrl/effective_sample_share` and `trustrl/chi_square` are taken before mask and cap.
"""

from dataclasses import dataclass, replace
from typing import get_args

from trustrl.config import validators
from trustrl.config.axes import Needs, StalenessRegion
from trustrl.config.statistics import ANCHORS, Anchor, FullKL, FullTV, SequenceRatio, Statistic, TopKKL, TopKTV
from trustrl.config.terms import Correction, SequenceMeanTokenMean, reads_sequences
from trustrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchoredRegion(StalenessRegion):
    """Settings shared by all anchored regions."""

    anchor: Anchor = "behavior"
    """b: the policy that distances are measured from. `behavior` is the sampler's record, `proximal` the trainer's."""

    correction: Correction | None = None
    """Correction of the mismatch π'/μ, multiplied onto the weight. Requires `anchor="proximal"`."""

    def masks_tokens(self) -> bool:
        """Returns whether the region masks single tokens by a bound, which `when_stale="tighten"` requires."""
        axes = self.axes()
        return axes is not None and axes.masks_tokens()


def check_common(region: AnchoredRegion, max_ratio: float | None = None) -> None:
    """Validates the anchor, correction, cap and largest staleness of a region."""
    kind, anchor, correction = region.kind, region.anchor, region.correction
    check_staleness(region)
    validators.one_of(f"{kind}.anchor", anchor, ANCHORS)
    if correction is not None:
        validators.instance(f"{kind}.correction", correction, get_args(Correction))
        if anchor == "behavior":
            raise ConfigError(
                f"{kind}.correction must be None with anchor='behavior', got {correction!r}. "
                "π/μ already contains π'/μ, so the correction would apply the mismatch twice. "
                "Use anchor='proximal' with the correction, or remove the correction."
            )
    if max_ratio is not None:
        validators.real(f"{kind}.max_ratio", max_ratio, rule="a cap on the weight, > 0, or None", low=0.0)


def check_staleness(region: StalenessRegion) -> None:
    """Validates the treatment of stale tokens.

    Raises:
        ConfigError: If the region does not mask single tokens by a bound that could be tightened.
    """
    kind = region.kind
    validators.one_of(f"{kind}.when_stale", region.when_stale, ("drop", "tighten"))
    if region.max_staleness is not None:
        validators.whole(f"{kind}.max_staleness", region.max_staleness, low=0, advice="Or use None to ignore ages.")
    elif region.when_stale != "drop":
        raise ConfigError(
            f"{kind}.max_staleness must be given with when_stale={region.when_stale!r}, got None. "
            "Set the largest age that counts as fresh."
        )
    if region.when_stale == "tighten" and not region.masks_tokens():
        raise ConfigError(
            f"{kind}.when_stale must be 'drop', got 'tighten'. Only a region that masks single tokens by a bound can "
            "tighten it: dppo, ppo, ipo, kpop, minirl, or trust-region at level 'token' with action 'mask' or 'clip'."
        )


def needs_of(
    statistic: Statistic | None, anchor: Anchor, correction: Correction | None, *, sequences: bool = False
) -> Needs:
    """Returns the data that a statistic measured from this anchor needs, with an optional correction."""
    return Needs(
        anchors=frozenset({anchor}) if correction is None else frozenset({"behavior", "proximal"}),
        topk=statistic.k if isinstance(statistic, (TopKTV, TopKKL)) else 0,
        anchor=anchor,
        full=isinstance(statistic, (FullTV, FullKL)),
        sequences=sequences or reads_sequences(correction),
        reduction=SequenceMeanTokenMean if isinstance(statistic, SequenceRatio) else None,
    )


def differentiated(needs: Needs, *, k: int, tail_mass: float, full: bool) -> Needs:
    """Returns the needs of a region that differentiates the anchor's top k ids, or the whole vocabulary."""
    if full:
        return replace(needs, projects=True, full=True)
    return replace(needs, projects=True, topk=k, tail_mass=tail_mass)

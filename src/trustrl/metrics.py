"""The metric dictionary: what each number means, when it is healthy, what to do, and its name elsewhere.

One entry defines a metric everywhere: logs, reports, documentation and the command line read this file.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MANTISSA_BITS, SMALLEST_EXPONENT, LARGEST_EXPONENT = 3, -27, 10
FIRST_BIN = ((SMALLEST_EXPONENT + 127) << MANTISSA_BITS) - 1
HALF = (LARGEST_EXPONENT - SMALLEST_EXPONENT) << MANTISSA_BITS
NUM_BINS = 2 * HALF + 1
"""Histograms: a bin around 0, then 8 bins to each power of two from 2⁻²⁷ (7e-9) to 2¹⁰ on each side, the last ones open."""

PROBABILITY_EDGES = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99)
"""Bins of the anchor's probability: below the first, between neighbours, from the last up."""

STALENESS_EDGES = (1.0, 2.0, 3.0, 5.0, 9.0, 17.0)
"""Bins of staleness in weight versions: 0 | 1 | 2 | 3-4 | 5-8 | 9-16 | 17 and more."""


class Totals(dict[str, Any]):
    """Sums by name, on the host: numbers, or lists for histograms and bins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One named number."""

    name: str
    """Logged as `trustrl/<name>`."""

    formula: str
    unit: str
    direction: str
    """Which way trouble lies."""

    healthy: str
    """The band a healthy run was seen in, or what decides it; "none" where there is no such band."""

    action: str
    """What to do when it leaves that band."""

    reads: tuple[str, ...]
    """The sums it is made of; it is absent where one of them is."""

    compute: Callable[[Totals], float]
    elsewhere: dict[str, str] = field(default_factory=dict)
    """The nearest metric of each engine, by engine name; close in meaning, not always equal in definition."""

    def value(self, totals: Totals) -> float | None:
        """The metric, or None where a sum is missing or there is nothing to divide by."""
        if any(name not in totals for name in self.reads):
            return None
        try:
            return float(self.compute(totals))
        except ZeroDivisionError:
            return None


def quantile(bins: list[float], share: float) -> float:
    """The value below which this share of a histogram lies, to the width of a bin (at most 12.5 %).

    Examples:
        >>> bins = [0.0] * NUM_BINS
        >>> bins[HALF] = 1.0
        >>> quantile(bins, 0.5)
        0.0
    """
    total = sum(bins)
    if not total:
        raise ZeroDivisionError
    wanted, below = share * total, 0.0
    for at, count in enumerate(bins):
        if count and below + count >= wanted:
            part = (wanted - below) / count
            return _inside_bin(at - HALF, part if at > HALF else 1 - part)
        below += count
    return _inside_bin(HALF, 1.0)


def _inside_bin(step: int, part: float) -> float:
    """A point between the bin's edge nearer to 0 (part 0) and its other edge (part 1)."""
    if step == 0:
        return 0.0
    low, high = (_edge(abs(step) - 1 + more) for more in (0, 1))
    return math.copysign(low + part * (high - low), step)


def _edge(at: int) -> float:
    octave, eighth = divmod(at, 1 << MANTISSA_BITS)
    return 2.0 ** (SMALLEST_EXPONENT + octave) * (1 + eighth / (1 << MANTISSA_BITS))


def _share(over: str, of: str) -> Callable[[Totals], float]:
    return lambda t: t[over] / t[of]


def _quantile(name: str, share: float) -> Callable[[Totals], float]:
    return lambda t: quantile(t[f"histogram/{name}"], share)


def _highest(name: str) -> Callable[[Totals], float]:
    return lambda t: _finite(t[f"max/{name}"])


def _lowest(name: str) -> Callable[[Totals], float]:
    return lambda t: -_finite(t[f"min/{name}"])


def _finite(x: float) -> float:
    if math.isinf(x) and x < 0:
        raise ZeroDivisionError  # no token
    return x


_CLIPPED = {
    "verl": "actor/pg_clipfrac",
    "trl": "clip_ratio/region_mean",
    "openrlhf": "ppo_clip_ratio",
    "skyrl": "ppo_clip_ratio",
    "prime-rl": "is_masked",
}
_NONE = "none: depends on the task"

_LIST: list[Metric] = [
    Metric(
        name="masked_share", formula="stopped tokens / tokens with A ≠ 0", unit="share", direction="high is trouble",
        healthy="below a few per cent; 0 at the first update of a batch", reads=("stopped", "signed"),
        action="Rising: the policy outruns its region. Lower the learning rate or the updates per batch. Above 0 at the first update: sampler and trainer disagree.",
        compute=_share("stopped", "signed"), elsewhere=_CLIPPED,
    ),
    Metric(
        name="masked_share_increase", formula="stopped with r > 1 / tokens with A ≠ 0", unit="share", direction="high is trouble",
        healthy="see masked_share", action="Tokens rose past the bound and were still pushed up.", reads=("stopped/increase", "signed"),
        compute=_share("stopped/increase", "signed"), elsewhere={"trl": "clip_ratio/high_mean", "prime-rl": "is_masked_high"},
    ),
    Metric(
        name="masked_share_decrease", formula="stopped with r < 1 / tokens with A ≠ 0", unit="share", direction="high is trouble",
        healthy="see masked_share", action="Tokens fell past the bound and were still pushed down.", reads=("stopped/decrease", "signed"),
        compute=_share("stopped/decrease", "signed"), elsewhere={"trl": "clip_ratio/low_mean", "prime-rl": "is_masked_low"},
    ),
    Metric(
        name="bad_update_share", formula="tokens with A < 0 and b − π ≥ .5 / measured tokens", unit="share", direction="high is trouble",
        healthy="0, or a few in a million", action="Likely tokens are being destroyed: tighten max_decrease.", reads=("bad_updates", "measured"),
        compute=_share("bad_updates", "measured"),
    ),
    Metric(
        name="gap_mean", formula="mean of π − b", unit="probability", direction="far from 0 is trouble", healthy="near 0",
        action="A drift of one sign: the batch as a whole became more or less likely.", reads=("gap", "measured"), compute=_share("gap", "measured"),
    ),
    Metric(
        name="gap_abs_mean", formula="mean of |π − b|, an estimate of how far sampled tokens moved", unit="probability", direction="high is trouble",
        healthy="well below the TV bound", action="Lower the learning rate, or check staleness.", reads=("gap/abs", "measured"), compute=_share("gap/abs", "measured"),
    ),
    Metric(
        name="gap_min", formula="min of π − b", unit="probability", direction="low is trouble", healthy=_NONE,
        action="Below −.5: see bad_update_share.", reads=("min/gap",), compute=_lowest("gap"),
    ),
    Metric(
        name="gap_max", formula="max of π − b", unit="probability", direction="high is trouble", healthy=_NONE,
        action="Look at the token.", reads=("max/gap",), compute=_highest("gap"),
    ),
    Metric(
        name="ratio_mean", formula="mean of r = π/b before truncation", unit="ratio", direction="far from 1 is trouble", healthy="1 ± .02",
        action="Its expectation is 1 when b sampled the tokens: far from 1, b is not what sampled.", reads=("ratio", "measured"), compute=_share("ratio", "measured"),
    ),
    Metric(
        name="ratio_max", formula="exp(max log r) before truncation", unit="ratio", direction="high is trouble", healthy=_NONE,
        action="Cap it (max_ratio) if single tokens dominate the effective sample size.", reads=("max/log_ratio",),
        compute=lambda t: math.exp(min(_finite(t["max/log_ratio"]), 700.0)),
    ),
    Metric(
        name="weight_mean", formula="mean of w after truncation, correction and penalty, over tokens that act", unit="ratio", direction="far from ratio_mean means truncation acts",
        healthy="close to ratio_mean", action="Compare with ratio_mean: the difference is what the region, the cap and the drops removed.", reads=("weight", "acting"), compute=_share("weight", "acting"),
    ),
    Metric(
        name="capped_share", formula="tokens with r above the cap / measured tokens", unit="share", direction="high is trouble", healthy="below 1 %",
        action="A cap that acts often biases the gradient: see ratio_max.", reads=("extra/capped", "measured"), compute=_share("extra/capped", "measured"),
    ),
    Metric(
        name="kl_k1", formula="mean of −log r, unbiased for KL(b‖π) when b sampled", unit="nats", direction="high is trouble", healthy="near 0",
        action="Negative means more sampled tokens rose than fell.", reads=("log_ratio", "measured"), compute=lambda t: -t["log_ratio"] / t["measured"],
        elsewhere={"verl": "actor/ppo_kl", "openrlhf": "ppo_kl"},
    ),
    Metric(
        name="kl_k2", formula="mean of ½ log² r", unit="nats", direction="high is trouble", healthy="below .01",
        action="Lower the learning rate.", reads=("log_ratio/square", "measured"), compute=lambda t: 0.5 * t["log_ratio/square"] / t["measured"],
    ),
    Metric(
        name="kl_k3", formula="mean of r − 1 − log r, unbiased for KL(b‖π) when b sampled", unit="nats", direction="high is trouble", healthy="below .01",
        action="Lower the learning rate, or sync weights more often.", reads=("ratio", "log_ratio", "measured"),
        compute=lambda t: (t["ratio"] - t["log_ratio"]) / t["measured"] - 1, elsewhere={"prime-rl": "mismatch_kl"},
    ),
    Metric(
        name="effective_sample_share", formula="(Σr)² / (N Σr²), token level, before truncation", unit="share", direction="low is trouble", healthy="above .9",
        action="A few tokens carry the gradient: sync weights more often, or cap the ratio.", reads=("ratio", "ratio/square", "measured"),
        compute=lambda t: t["ratio"] ** 2 / (t["measured"] * t["ratio/square"]),
    ),
    Metric(
        name="chi_square", formula="mean r² − 1, token level, before truncation", unit="none", direction="high is trouble", healthy="below .1",
        action="As effective_sample_share.", reads=("ratio/square", "measured"), compute=lambda t: t["ratio/square"] / t["measured"] - 1,
    ),
    Metric(
        name="divergence_mean", formula="mean of D's lower end (finite ones)", unit="the statistic's", direction="high is trouble", healthy="well below the bound",
        action="Compare with the bound; see the quantiles.", reads=("divergence", "divergence/finite"),
        compute=_share("divergence", "divergence/finite"),
    ),
    Metric(
        name="divergence_max", formula="max of D's lower end", unit="the statistic's", direction="high is trouble", healthy=_NONE,
        action="Look at the token.", reads=("max/divergence",), compute=_highest("divergence"),
    ),
    Metric(
        name="divergence_infinite", formula="tokens whose D is +inf (the policy rules out what the anchor allows)", unit="tokens", direction="high is trouble", healthy="0",
        action="Log-probs were rounded to 0 or 1: compute them in float32 and give tail_logp.", reads=("divergence/infinite",), compute=lambda t: t["divergence/infinite"],
    ),
    Metric(
        name="divergence_upper_mean", formula="mean of D's upper end (finite ones)", unit="the statistic's", direction="high is trouble", healthy=_NONE,
        action="Far above divergence_mean: the support is too small to tell.", reads=("divergence/upper", "divergence/upper_finite"),
        compute=_share("divergence/upper", "divergence/upper_finite"),
    ),
    Metric(
        name="undecided_share", formula="tokens whose bound lies inside [lower, upper) / measured tokens", unit="share", direction="high is uninformative", healthy=_NONE,
        action="The approximation cannot tell inside from outside there. It changes no gradient; a larger K narrows it.", reads=("undecided", "decidable"),
        compute=_share("undecided", "decidable"),
    ),
    Metric(
        name="anchor_tail_mean", formula="mean of b's mass outside the support", unit="probability", direction="high is uninformative", healthy=_NONE,
        action="Record more ids.", reads=("tail/anchor", "tail/measured"), compute=_share("tail/anchor", "tail/measured"),
    ),
    Metric(
        name="policy_tail_mean", formula="mean of π's mass outside the support", unit="probability", direction="rising is trouble", healthy="close to anchor_tail_mean",
        action="Mass flows into ids nobody looks at: entropy is exploding.", reads=("tail/policy", "tail/measured"), compute=_share("tail/policy", "tail/measured"),
    ),
    Metric(
        name="entropy", formula="mean entropy of π", unit="nats", direction="a fast change either way is trouble", healthy=_NONE,
        action="Falling to 0: raise max_increase or add a bonus. Rising without end: see policy_tail_mean.",
        reads=("entropy/kept", "entropy/stopped", "entropy/kept_measured", "entropy/stopped_measured"),
        compute=lambda t: (t["entropy/kept"] + t["entropy/stopped"]) / (t["entropy/kept_measured"] + t["entropy/stopped_measured"]),
        elsewhere={"verl": "actor/entropy", "trl": "entropy", "skyrl": "policy_entropy", "prime-rl": "entropy"},
    ),
    Metric(
        name="entropy_stopped", formula="mean entropy at stopped tokens", unit="nats", direction="none", healthy=_NONE,
        action="High: the region stops exploration.", reads=("entropy/stopped", "entropy/stopped_measured"), compute=_share("entropy/stopped", "entropy/stopped_measured"),
    ),
    Metric(
        name="entropy_kept", formula="mean entropy at kept tokens", unit="nats", direction="none", healthy=_NONE,
        action="Compare with entropy_stopped.", reads=("entropy/kept", "entropy/kept_measured"), compute=_share("entropy/kept", "entropy/kept_measured"),
    ),
    Metric(
        name="mismatch_abs_mean", formula="mean of |log π' − log μ|", unit="nats", direction="high is trouble", healthy="1e-5 in fp32, 1e-2 to 4e-2 with a bf16 sampler",
        action="Trainer and sampler disagree on the same weights: check dtype, temperature, truncation, tied heads, stale weights.", reads=("mismatch/abs", "mismatch/measured"),
        compute=_share("mismatch/abs", "mismatch/measured"), elsewhere={"trl": "sampling/sampling_logp_difference/mean", "skyrl": "policy/rollout_train_logprobs_abs_diff_mean"},
    ),
    Metric(
        name="mismatch_max", formula="max of log π' − log μ", unit="nats", direction="high is trouble", healthy="below .3 with a bf16 sampler",
        action="As mismatch_abs_mean.", reads=("max/mismatch",), compute=_highest("mismatch"), elsewhere={"trl": "sampling/sampling_logp_difference/max", "skyrl": "policy/rollout_train_logprobs_abs_diff_max"},
    ),
    Metric(
        name="mismatch_min", formula="min of log π' − log μ", unit="nats", direction="low is trouble", healthy="above −.3 with a bf16 sampler",
        action="As mismatch_abs_mean.", reads=("min/mismatch",), compute=_lowest("mismatch"),
    ),
    Metric(
        name="mismatch_ratio_mean", formula="mean of k = π'/μ", unit="ratio", direction="far from 1 is trouble", healthy="1 ± .01",
        action="Its expectation is 1 when μ sampled: far from 1, the record is not of what sampled.", reads=("mismatch", "mismatch/measured"), compute=_share("mismatch", "mismatch/measured"),
        elsewhere={"trl": "sampling/importance_sampling_ratio/mean"},
    ),
    Metric(
        name="correction_mean", formula="mean of the mismatch correction", unit="ratio", direction="far from 1 is trouble", healthy="1 ± .02",
        action="Compare with mismatch_ratio_mean.", reads=("extra/correction", "measured"), compute=_share("extra/correction", "measured"),
    ),
    Metric(
        name="correction_zero_share", formula="tokens the correction dropped / measured tokens", unit="share", direction="high is trouble", healthy="below 1 %",
        action="Large: repair the mismatch instead of masking it.", reads=("extra/correction_zero", "measured"), compute=_share("extra/correction_zero", "measured"),
    ),
    Metric(
        name="projected_share", formula="tokens outside the KL ball / measured tokens", unit="share", direction="high is trouble", healthy="a few per cent",
        action="As masked_share.", reads=("extra/projected", "measured"), compute=_share("extra/projected", "measured"),
    ),
    Metric(
        name="projected_kl_before", formula="mean KL(π‖b) over cells", unit="nats", direction="high is trouble", healthy="below the bound",
        action="Rising without end: raise alpha or lower the learning rate.", reads=("extra/projected_kl_before", "measured"), compute=_share("extra/projected_kl_before", "measured"),
    ),
    Metric(
        name="projected_kl_after", formula="mean KL(π̂‖b) over cells", unit="nats", direction="none", healthy="at most the bound, by construction",
        action="Above the bound is a defect: report it.", reads=("extra/projected_kl_after", "measured"), compute=_share("extra/projected_kl_after", "measured"),
    ),
    Metric(
        name="projected_beta", formula="mean β over projected tokens", unit="none", direction="low is trouble", healthy=_NONE,
        action="Small: tokens are pulled back hard.", reads=("extra/projected_beta", "extra/projected"), compute=_share("extra/projected_beta", "extra/projected"),
    ),
    Metric(
        name="projected_evaluations", formula="mean evaluations of KL(β) per projected token", unit="count", direction="high is slow", healthy="3 to 5",
        action="Many: extreme tokens; look at projected_kl_before.", reads=("extra/projected_evaluations", "extra/projected"), compute=_share("extra/projected_evaluations", "extra/projected"),
    ),
    Metric(
        name="projected_unconverged", formula="tokens whose root was not reached", unit="tokens", direction="high is trouble", healthy="0",
        action="Report the tokens.", reads=("extra/projected_unconverged",), compute=lambda t: t["extra/projected_unconverged"],
    ),
    Metric(
        name="tokens", formula="tokens in the loss", unit="tokens", direction="none", healthy=_NONE, action="The denominator of token means.", reads=("tokens",),
        compute=lambda t: t["tokens"],
    ),
    Metric(
        name="sequences", formula="sequences with a token in the loss", unit="sequences", direction="none", healthy=_NONE,
        action="The denominator of sequence means.", reads=("sequences",), compute=lambda t: t["sequences"],
    ),
    Metric(
        name="loss_weight", formula="Σ_t c_t: what the trainer's reduction multiplies the step's tokens with, in all", unit="none", direction="far from 1 is a scaled learning rate",
        healthy="1 for averages over tokens or sequences; less where a fixed length divides", action="Not 1 for an average: advantages, micro-batches or ranks are scaled twice or not at all.",
        reads=("loss_weight",), compute=lambda t: t["loss_weight"],
    ),
    Metric(
        name="dropped_share", formula="tokens in the loss left out for a fault / tokens in the loss", unit="share", direction="high is trouble", healthy="0",
        action="See the fault_ counts; trustrl.check names the place.", reads=("tokens", "used"), compute=lambda t: (t["tokens"] - t["used"]) / t["tokens"],
    ),
]  # fmt: skip

FAULTS = {
    "policy": "log π is NaN, infinite or above 0",
    "behavior": "log μ is NaN, infinite or above 0",
    "proximal": "log π' is NaN, infinite or above 0",
    "advantage": "the advantage is NaN or infinite",
    "support": "a log-prob of the top-K or the vocabulary is NaN or above 0, or the sampled id is out of range",
    "mass": "the probabilities of the top-K or the vocabulary sum to more than 1 on one side",
    "column": "the policy's log-prob in the sampled id's column differs from its logp",
    "narrow": "fewer than k ids are recorded and more than tail_mass of the anchor is left out",
    "overflow": "the term leaves the range of its dtype",
    "penalty_kl": "the KL penalty is not finite",
    "penalty_entropy": "the entropy is not finite",
}
"""Every kind of fault: when a token has it."""

MOSTLY_DROPPED = 0.5
"""Share of dropped tokens above which `rates` warns and `check` raises: such a batch trains on less than half of it."""

_LIST += [
    Metric(
        name=f"fault_{fault}", formula=f"tokens where {meaning}", unit="tokens", direction="high is trouble", healthy="0",
        action="These tokens are left out of the loss and stay in its denominator; trustrl.check names the place.",
        reads=(f"fault/{fault}",), compute=lambda t, name=f"fault/{fault}": t[name],
    )
    for fault, meaning in FAULTS.items()
]  # fmt: skip
_LIST += [
    Metric(
        name=f"loss_{term}", formula=f"the {term} term of the loss, reduced", unit="loss", direction="none",
        healthy=_NONE, action="Never compare the policy term across regions: its value is not a surrogate.",
        reads=(f"loss/{term}",), compute=lambda t, name=f"loss/{term}": t[name],
    )
    for term in ("policy", "kl", "entropy")
]  # fmt: skip
_LIST += [
    Metric(
        name=f"{name}_p{round(share * 100):02d}", formula=f"{round(share * 100)} % quantile of {of}", unit=unit, direction="none",
        healthy=_NONE, action="From a mergeable histogram: exact to one bin, at most 12.5 %.",
        reads=(f"histogram/{name}",), compute=_quantile(name, share),
    )
    for name, of, unit in (
        ("gap", "π − b", "probability"),
        ("log_ratio", "log r", "nats"),
        ("divergence", "D's lower end", "the statistic's"),
        ("divergence_upper", "D's upper end", "the statistic's"),
    )
    for share in (0.01, 0.5, 0.9, 0.99)
]  # fmt: skip


def bin_names(prefix: str, edges: tuple[float, ...]) -> list[str]:
    """The bins of these edges, the first and the last open."""
    return [f"{prefix}_below_{edges[0]:g}", *(f"{prefix}_from_{edge:g}" for edge in edges)]


def _bin_metrics(key: str, prefix: str, edges: tuple[float, ...], of: str) -> list[Metric]:
    made = []
    for at, where in enumerate(bin_names(prefix, edges)):
        for name, column, meaning in (("masked_share", 1, "stopped share"), ("gap_abs_mean", 2, "mean |π − b|")):
            made.append(
                Metric(
                    name=f"{name}_{where}", formula=f"{meaning} of tokens in this bin of {of}", unit="share" if column == 1 else "probability",
                    direction="none", healthy=_NONE, action="Shows which tokens the region acts on.", reads=(key,),
                    compute=lambda t, at=at, column=column: t[key][at][column] / t[key][at][0],
                )
            )  # fmt: skip
    return made


_LIST += _bin_metrics("by_probability", "probability", PROBABILITY_EDGES, "the anchor's probability")
_LIST += _bin_metrics("by_staleness", "staleness", STALENESS_EDGES, "staleness in weight versions")

METRICS: tuple[Metric, ...] = tuple(_LIST)
"""Every metric `trustrl.rates` can report."""

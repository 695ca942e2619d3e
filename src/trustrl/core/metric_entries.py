"""Entries of the metric dictionary: formula, unit, healthy range, action and the nearest metric of each engine."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Totals(dict[str, Any]):
    """Sums by name on the host: numbers, or lists for histograms and bins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Definition of one metric."""

    name: str
    """Logged as `trustrl/<name>`."""

    formula: str
    unit: str
    direction: str
    """Direction that indicates a problem."""

    healthy: str
    """Range observed in healthy runs, or "none" if there is no such range."""

    action: str
    """Recommended action when the metric leaves that range."""

    reads: tuple[str, ...]
    """Sums the metric is computed from. The metric is absent if one of them is."""

    compute: Callable[[Totals], float] | None = None
    """By default, the first of two sums is divided by the second, and a single sum or extreme is the metric itself."""

    elsewhere: dict[str, str] = field(default_factory=dict[str, str])
    """Nearest metric of each engine by engine name. The definitions may differ in detail."""

    def value(self, totals: Totals) -> float | None:
        """Returns the metric, or None if a sum is missing or the denominator is 0."""
        if any(name not in totals for name in self.reads):
            return None
        try:
            return float(_computed(self.reads, totals) if self.compute is None else self.compute(totals))
        except ZeroDivisionError:
            return None


def _computed(reads: tuple[str, ...], totals: Totals) -> float:
    first = totals[reads[0]]
    if len(reads) == 2:
        return first / totals[reads[1]]
    if reads[0].startswith("min/"):  # kept as the maximum of the negated number
        return -_finite(first)
    return _finite(first) if reads[0].startswith("max/") else first


def _finite(x: float) -> float:
    if math.isinf(x) and x < 0:
        raise ZeroDivisionError  # the batch has no token
    return x


_CLIPPED = {
    "verl": "actor/pg_clipfrac", "trl": "clip_ratio/region_mean", "openrlhf": "ppo_clip_ratio",
    "skyrl": "ppo_clip_ratio", "prime-rl": "is_masked",
}  # fmt: skip
NO_RANGE = "none: depends on the task"

ENTRIES: tuple[Metric, ...] = (
    Metric(
        name="masked_share", formula="masked tokens / tokens with A ≠ 0", unit="share", direction="high is bad",
        healthy="0 at the first update of a batch; at the last below 5% with at most 4 updates, below 35% with 16", reads=("masked", "signed"),
        action="If it rises, lower the learning rate or the number of updates per batch. If it is above 0 at the first update, sampler and trainer disagree.",
        elsewhere=_CLIPPED,
    ),
    Metric(
        name="masked_share_increase", formula="masked tokens with r > 1 / tokens with A ≠ 0", unit="share", direction="high is bad",
        healthy="see masked_share", action="Tokens rose past the bound and the update pushes them further up.", reads=("masked/increase", "signed"),
        elsewhere={"trl": "clip_ratio/high_mean", "prime-rl": "is_masked_high"},
    ),
    Metric(
        name="masked_share_decrease", formula="masked tokens with r < 1 / tokens with A ≠ 0", unit="share", direction="high is bad",
        healthy="see masked_share", action="Tokens fell past the bound and the update pushes them further down.", reads=("masked/decrease", "signed"),
        elsewhere={"trl": "clip_ratio/low_mean", "prime-rl": "is_masked_low"},
    ),
    Metric(
        name="masked_probability_mean", formula="mean of b at masked tokens", unit="probability", direction="low means that rare tokens are masked", healthy=NO_RANGE,
        action="Compare regions: PPO's clip masks rare tokens, a bound on TV frequent ones.", reads=("anchor/masked", "masked"),
    ),
    Metric(
        name="bad_update_share", formula="tokens with A < 0 and b − π ≥ 0.5 / measured tokens", unit="share", direction="high is bad",
        healthy="0, or a few in a million", action="Updates destroy likely tokens: tighten max_decrease.", reads=("bad_updates", "measured"),
    ),
    Metric(
        name="gap_mean", formula="mean of π − b", unit="probability", direction="far from 0 is bad", healthy="near 0",
        action="A drift with one sign means that the batch as a whole became more or less likely.", reads=("gap", "measured"),
    ),
    Metric(
        name="gap_abs_mean", formula="mean of |π − b|, estimates how far sampled tokens moved", unit="probability", direction="high is bad",
        healthy="well below the TV bound", action="Lower the learning rate, or check staleness.", reads=("gap/abs", "measured"),
    ),
    Metric(
        name="gap_min", formula="min of π − b", unit="probability", direction="low is bad", healthy=NO_RANGE, action="Below −0.5, see bad_update_share.", reads=("min/gap",),
    ),
    Metric(
        name="gap_max", formula="max of π − b", unit="probability", direction="high is bad", healthy=NO_RANGE, action="Inspect the token.", reads=("max/gap",),
    ),
    Metric(
        name="ratio_mean", formula="mean of r = π/b before truncation", unit="ratio", direction="far from 1 is bad", healthy="1 ± 0.02",
        action="Its expectation is 1 if b sampled the tokens. Far from 1, another policy sampled them.", reads=("ratio", "measured"),
    ),
    Metric(
        name="ratio_max", formula="exp(max log r) before truncation", unit="ratio", direction="high is bad", healthy=NO_RANGE,
        action="Set max_ratio if single tokens dominate the effective sample size.", reads=("max/log_ratio",),
        compute=lambda t: math.exp(min(_finite(t["max/log_ratio"]), 700.0)),
    ),
    Metric(
        name="weight_mean", formula="mean of w after truncation, correction and penalty, over unmasked tokens", unit="ratio", direction="far from ratio_mean means that truncation acts",
        healthy="close to ratio_mean", action="Compare with ratio_mean: the region, the cap and dropped tokens account for the difference.", reads=("weight", "acting"),
    ),
    Metric(
        name="capped_share", formula="tokens with r above the cap / measured tokens", unit="share", direction="high is bad", healthy=NO_RANGE,
        action="A cap that acts often biases the gradient. See ratio_max.", reads=("extra/capped", "measured"),
    ),
    Metric(
        name="sequence_dropped_share", formula="tokens in sequences that OPSM drops / measured tokens", unit="share", direction="high is bad", healthy="below 10%",
        action="The sampler and the policy disagree on losing responses: sync weights more often, or raise max_drift.",
        reads=("extra/sequence_dropped", "measured"),
    ),
    Metric(
        name="kl_k1", formula="mean of −log r, unbiased for KL(b‖π) when b sampled", unit="nats", direction="high is bad", healthy="near 0",
        action="A negative value means that more sampled tokens rose than fell.", reads=("log_ratio", "measured"), compute=lambda t: -t["log_ratio"] / t["measured"],
        elsewhere={"verl": "actor/ppo_kl", "openrlhf": "ppo_kl"},
    ),
    Metric(
        name="kl_k2", formula="mean of ½ log² r", unit="nats", direction="high is bad", healthy="below 0.01",
        action="Lower the learning rate.", reads=("log_ratio/square", "measured"), compute=lambda t: 0.5 * t["log_ratio/square"] / t["measured"],
    ),
    Metric(
        name="kl_k3", formula="mean of r − 1 − log r, unbiased for KL(b‖π) when b sampled", unit="nats", direction="high is bad", healthy="below 0.01",
        action="Lower the learning rate, or sync weights more often.", reads=("ratio", "log_ratio", "measured"),
        compute=lambda t: (t["ratio"] - t["log_ratio"]) / t["measured"] - 1, elsewhere={"prime-rl": "mismatch_kl"},
    ),
    Metric(
        name="effective_sample_share", formula="(Σr)² / (N Σr²), token level, before truncation", unit="share", direction="low is bad", healthy="above 0.9",
        action="A few tokens dominate the gradient: sync weights more often, or cap the ratio.", reads=("ratio", "ratio/square", "measured"),
        compute=lambda t: t["ratio"] ** 2 / (t["measured"] * t["ratio/square"]),
    ),
    Metric(
        name="chi_square", formula="mean r² − 1, token level, before truncation", unit="none", direction="high is bad", healthy="below 0.1",
        action="See effective_sample_share.", reads=("ratio/square", "measured"), compute=lambda t: t["ratio/square"] / t["measured"] - 1,
    ),
    Metric(
        name="divergence_mean", formula="mean of D's lower end, finite values only", unit="the statistic's", direction="high is bad", healthy="well below the bound",
        action="Compare with the bound. See the quantiles.", reads=("divergence", "divergence/finite"),
    ),
    Metric(
        name="divergence_max", formula="max of D's lower end", unit="the statistic's", direction="high is bad", healthy=NO_RANGE, action="Inspect the token.", reads=("max/divergence",),
    ),
    Metric(
        name="divergence_infinite", formula="tokens whose D is +inf (the policy excludes ids that the anchor allows)", unit="tokens", direction="high is bad", healthy="0",
        action="Rounding made probabilities 0 or 1: compute log-probs in float32 and pass tail_logp.", reads=("divergence/infinite",),
    ),
    Metric(
        name="divergence_upper_mean", formula="mean of D's upper end, finite values only", unit="the statistic's", direction="high is bad", healthy=NO_RANGE,
        action="Far above divergence_mean, the support is too small to decide.", reads=("divergence/upper", "divergence/upper_finite"),
    ),
    Metric(
        name="undecided_share", formula="tokens whose bound lies inside [lower, upper) / measured tokens; Top-K TV only", unit="share", direction="high is uninformative", healthy=NO_RANGE,
        action="The approximation cannot decide these tokens. The gradient is not affected. Raise k: a larger K narrows the interval.", reads=("undecided", "bounded"),
    ),
    Metric(
        name="anchor_tail_mean", formula="mean of b's mass outside the support", unit="probability", direction="high is uninformative", healthy=NO_RANGE,
        action="Record more ids.", reads=("tail/anchor", "tail/measured"),
    ),
    Metric(
        name="policy_tail_mean", formula="mean of π's mass outside the support", unit="probability", direction="rising is bad", healthy="close to anchor_tail_mean",
        action="Probability mass moves to unrecorded ids: entropy is exploding.", reads=("tail/policy", "tail/measured"),
    ),
    Metric(
        name="entropy", formula="mean entropy of π", unit="nats", direction="a fast change in either direction is bad", healthy=NO_RANGE,
        action="If it falls to 0, raise max_increase or add an entropy bonus. If it keeps rising, see policy_tail_mean.",
        reads=("entropy/kept", "entropy/masked", "entropy/kept_measured", "entropy/masked_measured"),
        compute=lambda t: (t["entropy/kept"] + t["entropy/masked"]) / (t["entropy/kept_measured"] + t["entropy/masked_measured"]),
        elsewhere={"verl": "actor/entropy", "trl": "entropy", "skyrl": "policy_entropy", "prime-rl": "entropy"},
    ),
    Metric(
        name="entropy_stopped", formula="mean entropy at masked tokens", unit="nats", direction="none", healthy=NO_RANGE,
        action="If it is high, the region masks exploration.", reads=("entropy/masked", "entropy/masked_measured"),
    ),
    Metric(
        name="entropy_kept", formula="mean entropy at kept tokens", unit="nats", direction="none", healthy=NO_RANGE,
        action="Compare with entropy_stopped.", reads=("entropy/kept", "entropy/kept_measured"),
    ),
    Metric(
        name="mismatch_abs_mean", formula="mean of |log π' − log μ|", unit="nats", direction="high is bad", healthy="1e-5 in fp32, 1e-2 to 4e-2 with a bf16 sampler",
        action="Trainer and sampler disagree at the same weights: check dtype, temperature, truncation, tied heads and stale weights.", reads=("mismatch/abs", "mismatch/measured"),
        elsewhere={"trl": "sampling/sampling_logp_difference/mean", "skyrl": "policy/rollout_train_logprobs_abs_diff_mean"},
    ),
    Metric(
        name="mismatch_gap_abs_mean", formula="mean of |π' − μ|", unit="probability", direction="high is bad", healthy=NO_RANGE,
        action="See mismatch_abs_mean.", reads=("mismatch/gap", "mismatch/measured"), elsewhere={"verl": "training/rollout_probs_diff_mean"},
    ),
    Metric(
        name="mismatch_max", formula="max of log π' − log μ", unit="nats", direction="high is bad", healthy="below 0.3 with a bf16 sampler",
        action="See mismatch_abs_mean.", reads=("max/mismatch",), elsewhere={"trl": "sampling/sampling_logp_difference/max", "skyrl": "policy/rollout_train_logprobs_abs_diff_max"},
    ),
    Metric(
        name="mismatch_min", formula="min of log π' − log μ", unit="nats", direction="low is bad", healthy="above −0.3 with a bf16 sampler",
        action="See mismatch_abs_mean.", reads=("min/mismatch",),
    ),
    Metric(
        name="mismatch_ratio_mean", formula="mean of k = π'/μ", unit="ratio", direction="far from 1 is bad", healthy="1 ± 0.01",
        action="Its expectation is 1 if μ sampled the tokens. Far from 1, the recorded log-probs belong to another policy.", reads=("mismatch", "mismatch/measured"),
        elsewhere={"trl": "sampling/importance_sampling_ratio/mean"},
    ),
    Metric(
        name="correction_mean", formula="mean of the mismatch correction", unit="ratio", direction="far from 1 is bad", healthy="1 ± 0.02",
        action="Compare with mismatch_ratio_mean.", reads=("extra/correction", "measured"),
    ),
    Metric(
        name="correction_zero_share", formula="tokens that the correction drops / measured tokens", unit="share", direction="high is bad", healthy="below 1%",
        action="If it is large, fix the mismatch instead of masking it.", reads=("extra/correction_zero", "measured"),
    ),
    Metric(
        name="staleness_mean", formula="mean of the trained weights' version − the sampler's version", unit="versions", direction="high is bad", healthy="0 if synchronous; at most the trainer's limit if asynchronous",
        action="Sync weights more often, or set the region's max_staleness.", reads=("staleness", "staleness/measured"),
    ),
    Metric(
        name="staleness_max", formula="max of the same difference", unit="versions", direction="high is bad", healthy="see staleness_mean", action="See staleness_mean.", reads=("max/staleness",),
    ),
    Metric(
        name="stale_share", formula="tokens older than the region's max_staleness / measured tokens", unit="share", direction="high is bad", healthy="below a few percent",
        action="The region drops these tokens or tightens their bound. See staleness_mean.", reads=("extra/stale", "measured"),
    ),
    Metric(
        name="projected_share", formula="tokens outside the KL ball / measured tokens", unit="share", direction="high is bad", healthy="a few percent",
        action="See masked_share.", reads=("extra/projected", "measured"),
    ),
    Metric(
        name="projected_kl_before", formula="mean KL(π‖b) over cells", unit="nats", direction="high is bad", healthy="below the bound",
        action="If it keeps rising, raise alpha or lower the learning rate.", reads=("extra/projected_kl_before", "measured"),
    ),
    Metric(
        name="projected_kl_after", formula="mean KL(π̂‖b) over cells", unit="nats", direction="none", healthy="at most the bound, by construction",
        action="A value above the bound is a bug: report it.", reads=("extra/projected_kl_after", "measured"),
    ),
    Metric(
        name="projected_beta", formula="mean β over projected tokens", unit="none", direction="low is bad", healthy=NO_RANGE,
        action="A small value means that the projection pulls tokens back strongly.", reads=("extra/projected_beta", "extra/projected"),
    ),
    Metric(
        name="projected_evaluations", formula="mean evaluations of KL(β) per projected token", unit="count", direction="high is slow", healthy="3 to 5",
        action="If it is high, some tokens are extreme: see projected_kl_before.", reads=("extra/projected_evaluations", "extra/projected"),
    ),
    Metric(
        name="projected_unconverged", formula="tokens for which the solver did not converge", unit="tokens", direction="high is bad", healthy="0",
        action="Report these tokens as a bug.", reads=("extra/projected_unconverged",),
    ),
    Metric(
        name="tokens", formula="tokens in the loss", unit="tokens", direction="none", healthy=NO_RANGE, action="The denominator of token means.", reads=("tokens",),
    ),
    Metric(
        name="sequences", formula="sequences with a token in the loss", unit="sequences", direction="none", healthy=NO_RANGE,
        action="The denominator of sequence means.", reads=("sequences",),
    ),
    Metric(
        name="loss_weight", formula="Σ_t c_t: sum of the weights that the trainer's reduction gives to the step's tokens", unit="none", direction="far from 1 scales the learning rate",
        healthy="1 for averages over tokens or sequences; less with a fixed length", action="If an average is not 1, advantages, micro-batches or ranks are scaled twice or not at all.",
        reads=("loss_weight",),
    ),
    Metric(
        name="dropped_share", formula="faulty tokens in the loss / tokens in the loss", unit="share", direction="high is bad", healthy="0",
        action="See the fault_ counts. trustrl.check locates the tokens.", reads=("tokens", "used"), compute=lambda t: (t["tokens"] - t["used"]) / t["tokens"],
    ),
)  # fmt: skip
"""Single entries. `trustrl.core.metrics` adds families of them."""

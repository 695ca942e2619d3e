"""The metric dictionary, and the core metrics that engines log by default.

Logs, reports, documentation and the command line all read it. Loads without torch.
"""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

from trustrl.config.validators import one_of
from trustrl.core.metric_entries import ENTRIES, NO_RANGE, Metric, Totals
from trustrl.core.sum_table import PROBABILITY_EDGES, STALENESS_EDGES, bin_names, quantile

FAULTS = {
    "policy": "log π is NaN, infinite or above 0",
    "behavior": "log μ is NaN, infinite or above 0",
    "proximal": "log π' is NaN, infinite or above 0",
    "advantage": "the advantage is NaN or infinite",
    "support": "a log-prob of the top-K or the vocabulary is NaN or above 0, or the sampled id is out of range",
    "mass": "the probabilities of the top-K or the vocabulary sum to more than 1 on one side",
    "column": "the policy's log-prob in the sampled id's column differs from its logp",
    "narrow": "fewer than k ids are recorded and more than tail_mass of the anchor is left out",
    "overflow": "the loss term overflows its dtype",
    "penalty_kl": "the KL penalty is not finite",
    "penalty_entropy": "the entropy is not finite",
}
"""Every kind of fault, with the condition for it."""

MOSTLY_DROPPED = 0.5
"""Share of dropped tokens above which `rates` warns and `check` raises."""

_FAULT_COUNTS = [
    Metric(
        name=f"fault_{fault}", formula=f"tokens where {meaning}", unit="tokens", direction="high is bad", healthy="0",
        action="The loss drops these tokens and keeps them in its denominator. trustrl.check locates them.",
        reads=(f"fault/{fault}",),
    )
    for fault, meaning in FAULTS.items()
]  # fmt: skip
_LOSSES = [
    Metric(
        name=f"loss_{term}", formula=f"the {term} term of the loss, reduced", unit="loss", direction="none",
        healthy=NO_RANGE, action="Do not compare the policy term across regions: its value is not a surrogate.",
        reads=(f"loss/{term}",),
    )
    for term in ("policy", "kl", "entropy")
]  # fmt: skip


def _quantile(name: str, share: float) -> Callable[[Totals], float]:
    return lambda t: quantile(t[f"histogram/{name}"], share)


_QUANTILES = [
    Metric(
        name=f"{name}_p{round(share * 100):02d}", formula=f"{round(share * 100)}% quantile of {of}", unit=unit, direction="none",
        healthy=NO_RANGE, action="Computed from a mergeable histogram: exact to one bin, at most 12.5%.",
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


def _bin_metrics(key: str, prefix: str, edges: tuple[float, ...], of: str) -> list[Metric]:
    made: list[Metric] = []
    for index, where in enumerate(bin_names(prefix, edges)):
        for name, column, meaning in (("masked_share", 1, "masked share"), ("gap_abs_mean", 2, "mean |π − b|")):
            made.append(
                Metric(
                    name=f"{name}_{where}", formula=f"{meaning} of tokens in this bin of {of}", unit="share" if column == 1 else "probability",
                    direction="none", healthy=NO_RANGE, action="Shows which tokens the region masks.", reads=(key,),
                    # Defaults, because a lambda would read the loop's variables when it is called.
                    compute=lambda t, index=index, column=column: t[key][index][column] / t[key][index][0],
                )
            )  # fmt: skip
    return made


METRICS: tuple[Metric, ...] = (
    *ENTRIES,
    *_FAULT_COUNTS,
    *_LOSSES,
    *_QUANTILES,
    *_bin_metrics("by_probability", "probability", PROBABILITY_EDGES, "the anchor's probability"),
    *_bin_metrics("by_staleness", "staleness", STALENESS_EDGES, "staleness in weight versions"),
)
"""Every metric that `trustrl.rates` reports."""

CORE = (
    "masked_share", "projected_share", "kl_k3", "divergence_mean", "divergence_p99", "undecided_share", "entropy",
    "mismatch_abs_mean", "mismatch_ratio_mean", "staleness_mean", "dropped_share",
)  # fmt: skip
"""Metrics that engines log by default. `trustrl explain` and `trustrl report` need no others, except counts of faults.

Eight apply to most runs. `projected_share` belongs to projections, `undecided_share` to Top-K TV, and `staleness_mean`
to samplers that report the version of their weights."""

Choice = Literal["core", "all"]
"""The metrics to log."""

_NAMES = frozenset(metric.name for metric in METRICS)


def check_choice(metrics: object, where: str = "metrics") -> None:
    """Raises if the setting is neither "core" nor "all". `where` is its name in the engine."""
    one_of(where, metrics, get_args(Choice))


def chosen(values: Mapping[str, float], metrics: Choice) -> dict[str, float]:
    """Returns the metrics to log.

    "core" keeps the metrics in `CORE`, counts of faults that occurred, and the values that a region itself reports.

    Args:
        values: Metrics by name, from `trustrl.rates`.
        metrics: "core" or "all".

    Raises:
        ConfigError: If `metrics` is neither "core" nor "all".

    Examples:
        >>> chosen({"trustrl/kl_k3": 0.1, "trustrl/kl_k2": 0.1, "trustrl/fault_policy": 0.0}, "core")
        {'trustrl/kl_k3': 0.1}
    """
    check_choice(metrics)
    return {name: value for name, value in values.items() if metrics == "all" or _is_core(name, value)}


def _is_core(name: str, value: float) -> bool:
    bare = name.removeprefix("trustrl/")
    return bare in CORE or bare not in _NAMES or (bare.startswith("fault_") and value > 0)

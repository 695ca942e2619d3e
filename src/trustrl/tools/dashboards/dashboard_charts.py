"""Charts that every dashboard shows: the core metrics with their healthy ranges, and how the run learns."""

from dataclasses import dataclass

from trustrl.core.metrics import CORE, METRICS

PREFIXES = ("train/", "actor/", "")
"""Prefixes of trustrl's metrics: TRL's trackers, verl's trackers, and TRL on MLflow."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    label: str
    names: tuple[str, ...]
    """Names that engines log it under. A run has one of them."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart of a dashboard."""

    title: str
    about: str
    """Healthy range and recommended action."""

    series: tuple[Series, ...]


def sections() -> dict[str, list[Chart]]:
    """Returns the charts by section. Every core metric is in one of them."""
    return {
        "Learning": [
            Chart(
                "Reward", "Mean over the completions of a batch.", (_logged("reward", "reward", "critic/score/mean"),)
            ),
            Chart("Gradient norm", "Before clipping.", (_logged("grad_norm", "grad_norm", "actor/grad_norm"),)),
            _chart("Entropy", "entropy"),
        ],
        "Region": [
            _chart("Tokens masked or projected", "masked_share", "projected_share"),
            _chart("Divergence from the anchor", "divergence_mean", "divergence_p99"),
            _chart("KL to the anchor", "kl_k3"),
            _chart("Tokens that K cannot decide", "undecided_share"),
        ],
        "Sampler and trainer": [
            _chart("Mismatch", "mismatch_abs_mean"),
            _chart("Mismatch ratio", "mismatch_ratio_mean"),
            _chart("Staleness", "staleness_mean"),
            _chart("Dropped tokens", "dropped_share"),
        ],
    }


def _chart(title: str, *names: str) -> Chart:
    entries = {metric.name: metric for metric in METRICS if metric.name in CORE}
    first = entries[names[0]]
    about = f"{first.formula}, in {first.unit}. Healthy: {first.healthy}. {first.action}"
    return Chart(title, about, tuple(Series(name, tuple(f"{p}trustrl/{name}" for p in PREFIXES)) for name in names))


def _logged(label: str, trl: str, verl: str) -> Series:
    return Series(label, (f"train/{trl}", verl, trl))

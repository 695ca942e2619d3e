"""Numeric bands of healthy values for charts, each with the text of the metric dictionary it comes from."""

from dataclasses import dataclass
from math import inf

from trustrl.core.metrics import METRICS
from trustrl.runs.run import RunSettings

HALF = frozenset({"bfloat16", "bf16", "float16", "fp16", "half"})
FULL = frozenset({"float32", "fp32", "float"})


@dataclass(frozen=True, slots=True)
class Band:
    """Range of healthy values. An end that is infinite is open."""

    low: float
    high: float
    source: str
    """The range in the words of the metric dictionary."""


_ENDS = {
    "masked_share": (0.0, 0.05),  # "a few percent" is drawn as 5%
    "capped_share": (0.0, 0.01),
    "kl_k2": (0.0, 0.01),
    "kl_k3": (0.0, 0.01),
    "chi_square": (-inf, 0.1),
    "ratio_mean": (0.98, 1.02),
    "effective_sample_share": (0.9, 1.0),
    "mismatch_ratio_mean": (0.99, 1.01),
    "correction_mean": (0.98, 1.02),
    "correction_zero_share": (0.0, 0.01),
    "dropped_share": (0.0, 0.0),
    "stale_share": (0.0, 0.05),
    "projected_share": (0.0, 0.05),
}
_BY_DTYPE = {"mismatch_abs_mean": {"full": (0.0, 1e-5), "half": (0.0, 4e-2)}, "mismatch_max": {"half": (-inf, 0.3)}}


def band_of(name: str, settings: RunSettings) -> Band | None:
    """Returns the band of a metric by its name without `trustrl/`, or None if it has no numeric range.

    The sampler–trainer mismatch depends on the dtypes. It has no band if the run's files do not contain them.
    """
    ends = _ENDS.get(name) or _BY_DTYPE.get(name, {}).get(_precision(settings))
    if ends is None:
        return None
    return Band(*ends, next(metric.healthy for metric in METRICS if metric.name == name))


def _precision(settings: RunSettings) -> str:
    found = {str(one).removeprefix("torch.") for one in (settings.sampler_dtype, settings.trainer_dtype) if one}
    if found & HALF:
        return "half"
    return "full" if found and found <= FULL else "unknown"

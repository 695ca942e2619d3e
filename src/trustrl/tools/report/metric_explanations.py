"""Explanations of the charts, and healthy bands, from the metric dictionary or written here for trainers' metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from trustrl.core.metrics import METRICS, Metric
from trustrl.runs.run import RunSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Definition of a metric that trainers log, with the fields of the metric dictionary."""

    formula: str
    unit: str
    healthy: str
    action: str
    direction: str = ""
    elsewhere: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of the nearest metric of each engine."""


def explained(name: str) -> Metric | Explanation | None:
    """Returns the explanation of a logged metric, or None if it has none.

    Example:
        >>> explained("trustrl/kl_k3").unit
        'nats'
    """
    ours = name.startswith("trustrl/") and _DICTIONARY.get(name.removeprefix("trustrl/"))
    return ours or _LOGGED_BY_TRAINERS.get(name)


_DICTIONARY = {metric.name: metric for metric in METRICS}
_TASK = "none: depends on the task"
_LOGGED_BY_TRAINERS = {
    "reward": Explanation(
        formula="mean reward of a rollout's completions", unit="the task's", healthy="rises, then levels off",
        direction="a fall is bad",
        action="A fall while the divergence or the mismatch rises points to the update; run `trustrl explain`. A rise "
        "while held-out accuracy falls points to the reward.",
        elsewhere={"trl": "reward", "verl": "critic/score/mean"},
    ),
    "accuracy": Explanation(
        formula="share of held-out problems solved; step 0 is before training", unit="share", healthy="rises",
        direction="a fall is bad",
        action="A last value below the first by more than two standard errors counts as a collapse.",
        elsewhere={"verl": "val-core/.../acc"},
    ),
    "grad_norm": Explanation(
        formula="L2 norm of the gradient before clipping", unit="L2", healthy=_TASK, direction="a sudden rise is bad",
        action="A spike that coincides with a rising masked share points to a few tokens with a large ratio. Read them "
        "among the completions, sorted by |log π/μ|.",
        elsewhere={"trl": "grad_norm", "verl": "actor/grad_norm"},
    ),
    "entropy": Explanation(
        formula="mean entropy of the policy over tokens", unit="nats", healthy=_TASK,
        direction="a fast change in either direction is bad",
        action="If it falls to 0, the policy no longer explores. If it keeps rising, probability mass moves to "
        "unlikely tokens.",
        elsewhere={"trl": "entropy", "verl": "actor/entropy"},
    ),
    "completion_length": Explanation(
        formula="mean number of tokens in a completion", unit="tokens", healthy=_TASK, direction="a drift is a hint",
        action="A rise without a rise in reward is padding. A fall to a few tokens is a collapse of the format.",
        elsewhere={"trl": "completions/mean_length", "verl": "response_length/mean"},
    ),
    "truncated_share": Explanation(
        formula="completions that reached the length limit / completions", unit="share", healthy="below a few percent",
        direction="high is bad", action="Raise the limit, or leave truncated completions out of the loss.",
        elsewhere={"trl": "completions/clipped_ratio", "verl": "response_length/clip_ratio"},
    ),
    "reward_std": Explanation(
        formula="standard deviation of the rewards inside a group, mean over groups", unit="the task's", healthy=_TASK,
        direction="near 0 is bad", action="Groups of equal rewards have no gradient. Use harder or easier problems.",
        elsewhere={"trl": "reward_std"},
    ),
    "frac_reward_zero_std": Explanation(
        formula="groups whose rewards are all equal / groups", unit="share", healthy=_TASK, direction="high is bad",
        action="These groups have no gradient. Use harder or easier problems, or more completions for each prompt.",
        elsewhere={"trl": "frac_reward_zero_std"},
    ),
    "clip_share": Explanation(
        formula="tokens whose ratio the engine's loss clips / tokens", unit="share", healthy="below a few percent",
        direction="high is bad", action="Lower the learning rate or the number of updates per batch.",
        elsewhere={"trl": "clip_ratio/region_mean", "verl": "actor/pg_clipfrac"},
    ),
    "loss": Explanation(
        formula="the trainer's loss", unit="none", healthy=_TASK, direction="not finite is bad",
        action="The value of a policy-gradient loss means little. A value that is not finite ends learning.",
    ),
    "learning_rate": Explanation(
        formula="learning rate of the step", unit="none", healthy=_TASK,
        action="Compare its schedule with the other curves.",
    ),
}  # fmt: skip


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
    return Band(*ends, _DICTIONARY[name].healthy)


def _precision(settings: RunSettings) -> str:
    dtypes = {str(dtype).removeprefix("torch.") for dtype in (settings.sampler_dtype, settings.trainer_dtype) if dtype}
    if dtypes & HALF:
        return "half"
    return "full" if dtypes and dtypes <= FULL else "unknown"

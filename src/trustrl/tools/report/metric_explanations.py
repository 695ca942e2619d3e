"""Explanations of the charts: from the metric dictionary, or written here for metrics that trainers log."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trustrl.core.metrics import METRICS, Metric


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Definition of a metric, its healthy range, and the recommended action."""

    formula: str
    unit: str
    healthy: str
    action: str
    direction: str = ""
    elsewhere: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of the nearest metric of each engine."""


def explained(name: str) -> Explanation | None:
    """Returns the explanation of a logged metric, or None if it has none.

    Example:
        >>> explained("trustrl/kl_k3").unit
        'nats'
    """
    metric = _DICTIONARY.get(name.removeprefix("trustrl/"))
    return _from_dictionary(metric) if name.startswith("trustrl/") and metric else _LOGGED_BY_TRAINERS.get(name)


def _from_dictionary(metric: Metric) -> Explanation:
    return Explanation(
        formula=metric.formula, unit=metric.unit, healthy=metric.healthy, action=metric.action,
        direction=metric.direction, elsewhere=metric.elsewhere,
    )  # fmt: skip


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

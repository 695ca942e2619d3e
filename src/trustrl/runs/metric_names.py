"""Metric names that all readers use, and the names of each trainer.

A trainer's metric is renamed only if its definition agrees with ours. All other metrics keep their names.
"""

import re
from collections.abc import Iterable, Mapping

from trustrl.core.metrics import METRICS

OF_ROLLOUT = ("reward", "reward_std", "frac_reward_zero_std", "frac_reward_nan")
TRL_KEPT = ("loss", "grad_norm", "learning_rate", "entropy", *OF_ROLLOUT)
"""TRL's metrics that keep their names. Those of a rollout are logged at its first update only."""

VERL_NAMES = {
    "critic/score/mean": "reward", "actor/pg_loss": "loss", "actor/grad_norm": "grad_norm", "actor/lr": "learning_rate",
    "response_length/mean": "completion_length", "actor/entropy": "entropy",
}  # fmt: skip
"""verl's metric names and trustrl's. All of `actor/trustrl/*` is kept too."""

CUT = "completions/clipped_ratio"
"""TRL: share of completions that reached the length limit without an end."""

AT_LIMIT, LONGEST = "response_length/clip_ratio", "response_length/max"
"""verl: share of responses as long as the limit, whether or not they ended there, and the longest one."""

ADVANTAGES = ("critic/advantages/min", "critic/advantages/max")
"""verl: the extremes of a batch's advantages."""

ACCURACY = re.compile(r"val-core/.*/(?:acc|reward)/mean@\d+")

_AGREEING = {"trl": ("mismatch_abs_mean",), "verl": ("kl_k1",), "skyrl": ("mismatch_abs_mean",), "prime-rl": ("kl_k3",)}
"""Entries of the metric dictionary whose nearest metric in this engine has the same definition.

TRL's `sampling_logp_difference/max` is the largest absolute value and its `importance_sampling_ratio` is truncated.
verl's `training/rollout_probs_diff_mean` is a difference of probabilities. All of these keep their names.
"""


def _from_dictionary(engine: str, end: str = "") -> dict[str, str]:
    theirs = {metric.name: metric.elsewhere.get(engine) for metric in METRICS if metric.name in _AGREEING[engine]}
    return {f"{name}{end}": f"trustrl/{ours}" for ours, name in theirs.items() if name is not None}


ENGINE_NAMES: Mapping[str, Mapping[str, str]] = {
    "trl": {
        **{name: name for name in (*TRL_KEPT, "kl")}, "completions/mean_length": "completion_length",
        "clip_ratio/region_mean": "clip_share", **_from_dictionary("trl"),
    },
    "verl": {**VERL_NAMES, "actor/pg_clipfrac": "clip_share", **_from_dictionary("verl")},
    "skyrl": _from_dictionary("skyrl"),
    "prime-rl": {
        "loss/mean": "loss", "entropy/all/mean": "entropy", "optim/lr": "learning_rate",
        "optim/grad_norm": "grad_norm", **_from_dictionary("prime-rl", "/all/mean"),
    },
}  # fmt: skip
"""Our name of each metric, by the trainer's name of it. Clipped tokens are counted alike by TRL and verl.
`kl` is the mean k3 estimate relative to the reference model.
"""

_TRACKED = re.compile(r"(train|eval|test)/(.+)")
_SIGNS = {
    "verl": ("actor/pg_loss", "critic/score/mean", "training/global_step", "actor/grad_norm"),
    "prime-rl": ("mismatch_kl/all/mean", "entropy/all/mean"),
    "trl": ("completions/mean_length", "frac_reward_zero_std", "num_tokens", "train/num_tokens", "train/grad_norm"),
}


def engine_of(names: Iterable[str]) -> str | None:
    """Returns the trainer that logs metrics of these names, or None if none is recognized.

    Example:
        >>> engine_of(["actor/pg_loss", "perf/throughput"])
        'verl'
    """
    logged = set(names)
    return next((engine for engine, signs in _SIGNS.items() if logged.intersection(signs)), None)


def our_name(name: str, engine: str | None) -> str:
    """Returns our name of a trainer's metric, or the trainer's name if we have none.

    Trackers receive TRL's metrics as `train/<name>` and `eval/<name>`.

    Example:
        >>> our_name("train/completions/mean_length", "trl"), our_name("eval/reward", "trl")
        ('completion_length', 'eval_reward')
        >>> our_name("actor/trustrl/masked_share", "verl"), our_name("perf/throughput", "verl")
        ('trustrl/masked_share', 'perf/throughput')
    """
    if engine == "trl" and (tracked := _TRACKED.fullmatch(name)):
        split, rest = tracked.groups()
        name = rest if split == "train" else f"{split}_{rest}"
    if engine == "verl" and name.startswith("actor/trustrl/"):
        return name.removeprefix("actor/")
    return ENGINE_NAMES.get(engine or "", {}).get(name, name)


def is_validation(name: str) -> bool:
    """Returns True if a metric, under the name that `our_name` returns, belongs to an evaluation.

    Example:
        >>> is_validation("eval_reward"), is_validation("val-aux/gsm8k/reward/std@4"), is_validation("reward")
        (True, True, False)
    """
    return name.startswith(("eval_", "test_", "val-", "val/", "validation/"))


def score_names(names: Iterable[str]) -> list[str]:
    """Returns the validation metrics that hold the mean score, accuracies before rewards.

    Example:
        >>> score_names(["val-core/gsm8k/reward/mean@4", "val-core/gsm8k/acc/mean@4", "eval_loss"])
        ['val-core/gsm8k/acc/mean@4']
    """
    ordered = sorted(names)
    accuracies = [name for name in ordered if ACCURACY.fullmatch(name) and "/acc/" in name]
    rewards = [name for name in ordered if ACCURACY.fullmatch(name) or name == "eval_reward"]
    return accuracies or rewards

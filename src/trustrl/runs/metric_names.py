"""Metric names that all readers use, and the names of each trainer.

A trainer's metric is renamed only if its definition agrees with ours. All other metrics keep their names.
"""

import re
from collections.abc import Iterable, Mapping

from trustrl.core.metrics import METRICS
from trustrl.runner.trl_run import KEPT
from trustrl.runner.verl_run import ACCURACY, NAMES

UNITS = {
    "reward": "reward", "reward_std": "reward", "loss": "loss", "grad_norm": "norm", "learning_rate": "1",
    "entropy": "nats", "completion_length": "tokens", "frac_reward_zero_std": "share of groups",
    "frac_reward_nan": "share of completions", "clip_share": "share of tokens", "kl": "nats",
    "seconds": "seconds", **{f"trustrl/{metric.name}": metric.unit for metric in METRICS},
}  # fmt: skip
"""Names of this table and their units. `kl` is the mean k3 estimate relative to the reference model."""

_AGREEING = {"trl": ("mismatch_abs_mean",), "verl": ("kl_k1",), "skyrl": ("mismatch_abs_mean",), "prime-rl": ("kl_k3",)}
"""Entries of the metric dictionary whose nearest metric in this engine has the same definition.

TRL's `sampling_logp_difference/max` is the largest absolute value and its `importance_sampling_ratio` is truncated.
verl's `training/rollout_probs_diff_mean` is a difference of probabilities. All of these keep their names.
"""


def _from_dictionary(engine: str, end: str = "") -> dict[str, str]:
    found = {metric.name: metric.elsewhere.get(engine) for metric in METRICS if metric.name in _AGREEING[engine]}
    return {f"{theirs}{end}": f"trustrl/{ours}" for ours, theirs in found.items() if theirs is not None}


ENGINE_NAMES: Mapping[str, Mapping[str, str]] = {
    "trl": {
        **{name: name for name in (*KEPT, "kl")}, "completions/mean_length": "completion_length",
        "clip_ratio/region_mean": "clip_share", **_from_dictionary("trl"),
    },
    "verl": {**NAMES, "actor/pg_clipfrac": "clip_share", **_from_dictionary("verl")},
    "skyrl": _from_dictionary("skyrl"),
    "prime-rl": {
        "loss/mean": "loss", "entropy/all/mean": "entropy", "optim/lr": "learning_rate",
        "optim/grad_norm": "grad_norm", **_from_dictionary("prime-rl", "/all/mean"),
    },
}  # fmt: skip
"""Our name of each metric, by the trainer's name of it. Clipped tokens are counted alike by TRL and verl."""

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
    found = set(names)
    return next((engine for engine, signs in _SIGNS.items() if found.intersection(signs)), None)


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
    found = sorted(names)
    accuracies = [name for name in found if ACCURACY.fullmatch(name) and "/acc/" in name]
    rewards = [name for name in found if ACCURACY.fullmatch(name) or name == "eval_reward"]
    return accuracies or rewards

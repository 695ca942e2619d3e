"""OpenRLHF's `train_ppo_ray` with a region: checks its arguments before Ray starts, and reaches every Ray worker."""

import argparse
import os
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from trustrl.config.axes import Region
from trustrl.engines.common import seam
from trustrl.engines.common.region_needs import by_trainer
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.common.sampler_fields import MAX_KEPT
from trustrl.engines.common.step_check import warn_if_it_cannot_act
from trustrl.engines.openrlhf.worker_hook import install
from trustrl.engines.refusals.openrlhf import ROWS, truncated
from trustrl.engines.refusals.rows import check, reader
from trustrl.errors import ConfigError

COMMAND = "openrlhf.cli.train_ppo_ray"
OPTION, VARIABLE = "--trustrl.region", "TRUSTRL_REGION"
KEPT, KEPT_VARIABLE = "--trustrl.max_kept", "TRUSTRL_MAX_KEPT"
HOOK = f"{install.__module__}.{install.__qualname__}"


def check_settings(args: Any, region: Any) -> Region:
    """Raises if an argument bypasses the region, counts the mismatch twice, or makes a ratio of unlike log-probs.

    Args:
        args: OpenRLHF's arguments, nested as its trainer reads them.
        region: A preset's name, or a region's settings as a dictionary or JSON.

    Returns:
        The region that the run will use.

    Raises:
        ConfigError: If an argument is refused; names the argument and the fix.
    """
    if not region:
        raise ConfigError(
            f"{OPTION} must name a region, got {region!r}. Try {OPTION} dppo-binary-tv-capped, or set {VARIABLE}."
        )
    chosen = region_given(region, OPTION)
    check(ROWS, _arguments(args), chosen)
    if by_trainer(chosen.needs(), "sampler"):
        samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
        warn_if_it_cannot_act(
            chosen,
            updates_per_batch=samples / args.train.batch_size * args.train.max_epochs,
            remedy="Set --train.batch_size below --rollout.batch_size times --rollout.n_samples_per_prompt or "
            '--train.max_epochs above 1, or anchor the region on the sampler with "anchor": "behavior".',
        )
    return chosen


def main() -> None:
    """Checks the arguments and runs OpenRLHF's command, whose Ray workers then train with the region.

    Raises:
        ConfigError: If an argument does not work with the region, before Ray is started; see `check_settings`.
        EngineError: If OpenRLHF reads its arguments in a way that this launcher does not support.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(OPTION, dest="region", default=os.environ.get(VARIABLE))
    parser.add_argument(KEPT, dest="max_kept", default=os.environ.get(KEPT_VARIABLE))
    own, rest = parser.parse_known_args()
    config: Any = import_module("openrlhf.utils.config")
    seam.require_parameters(config, "hierarchize", ("args",))
    ray: Any = import_module("ray")
    hierarchize, init = config.hierarchize, ray.init
    # OpenRLHF nests its arguments with this function before Ray starts: the one place that sees all of them.
    config.hierarchize = lambda args: _checked(hierarchize(args), own.region)
    ray.init = _with_hook(init, own.region, max_kept_given(own.max_kept))
    install()
    try:
        sys.argv = [COMMAND, *rest]
        runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)
    finally:
        config.hierarchize, ray.init = hierarchize, init


def max_kept_given(value: str | None) -> int:
    """Returns the largest number of ids that truncation may keep at a token.

    Raises:
        ConfigError: If the value is not a whole number ≥ 1.
    """
    number = str(value or MAX_KEPT)
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"{KEPT} must be a whole number ≥ 1, got {value!r}. The default is {MAX_KEPT}.")
    return int(number)


def _checked(args: Any, region: Any) -> Any:
    check_settings(args, region)
    return args


def _with_hook(init: Callable[..., Any], region: str, max_kept: int = MAX_KEPT) -> Callable[..., Any]:
    """Returns `ray.init` with the worker hook and trustrl's variables added to its runtime environment."""

    def started(*args: Any, **options: Any) -> Any:
        environment = dict(options.pop("runtime_env", None) or {})
        # Ray calls it in every worker process, and each imports OpenRLHF's trainer by itself.
        environment["worker_process_setup_hook"] = HOOK
        ours = {VARIABLE: region, KEPT_VARIABLE: str(max_kept)}
        environment["env_vars"] = dict(environment.get("env_vars") or {}) | ours
        return init(*args, runtime_env=environment, **options)

    return started


def is_truncated(args: Any) -> bool:
    """Returns whether OpenRLHF's arguments draw tokens from a part of the vocabulary."""
    return truncated(_arguments(args))


def _arguments(args: Any) -> Callable[[str, Any], Any]:
    """Returns a lookup of arguments by the names on the command line, `--actor.dual_clip`."""
    nested = reader(args)
    return lambda name, default=None: nested(name.removeprefix("--"), default)

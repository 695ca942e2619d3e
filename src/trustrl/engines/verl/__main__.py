"""`python -m trustrl.engines.verl ...`: verl's `main_ppo` with its own arguments, after a check of its settings."""

import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf
from verl.trainer import main_ppo

from trustrl.core import vocabulary_impl
from trustrl.core.impl import choice
from trustrl.engines.verl.verl_config import check_settings, fill_in
from trustrl.errors import EngineError

VARIABLE = "VERL_USE_EXTERNAL_MODULES"
MODULE = "trustrl.engines.verl"


def check_trl() -> None:
    """Raises EngineError if an installed TRL lacks the value head that verl's workers import wherever TRL is."""
    trl = find_spec("trl")  # without importing it, which takes seconds
    if trl is None or trl.origin is None:
        return
    places = ("experimental/ppo", "models/modeling_value_head.py")
    if not any((Path(trl.origin).parent / place).exists() for place in places):
        raise EngineError(
            f"TRL must have a value head where verl runs, got TRL {version('trl')}, which verl's workers fail to "
            "import. Uninstall trl here, or install it in another environment."
        )


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Checks the settings, makes every worker load the regions, and runs verl's `main_ppo`.

    Raises:
        ConfigError: If a setting does not work with the region, before Ray is started; see `check_settings`.
        EngineError: If verl's workers cannot start next to the installed TRL.
    """
    check_trl()
    for path, value in fill_in(config).items():
        print(f"trustrl: set {path}={value}, which the region needs", file=sys.stderr)
    check_settings(config)
    # verl logs a failing entry point at DEBUG and trains without it, so the modules travel in the variable instead.
    modules = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    if MODULE not in modules:
        modules.append(MODULE)
    os.environ[VARIABLE] = ",".join(modules)
    # A Ray cluster that is already running has a separate environment.
    for variable in (VARIABLE, vocabulary_impl.VARIABLE, choice.VARIABLE):
        if variable in os.environ:
            path = f"ray_kwargs.ray_init.runtime_env.env_vars.{variable}"
            OmegaConf.update(config, path, os.environ[variable], force_add=True)
    main_ppo.main(config)


if __name__ == "__main__":
    main()  # pyright: ignore[reportCallIssue] - hydra gives the configuration

"""`python -m trustrl.engines.verl ...`: verl's `main_ppo`, its own arguments, after a look at its settings."""

import os
import sys

import hydra
from omegaconf import DictConfig, OmegaConf
from verl.trainer import main_ppo

from trustrl.engines.verl.settings import check_settings, fill_in

VARIABLE = "VERL_USE_EXTERNAL_MODULES"
MODULE = "trustrl.engines.verl"


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Refuses what does not go with the region, has every worker load it, and hands over to verl.

    Raises:
        ConfigError: before Ray is started; see `check_settings`.
    """
    for path, value in fill_in(config).items():
        print(f"trustrl: {path}={value}, which the region needs", file=sys.stderr)
    check_settings(config)
    modules = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    if MODULE not in modules:
        modules.append(MODULE)
    os.environ[VARIABLE] = ",".join(modules)
    # A Ray cluster that runs already has an environment of its own.
    path = f"ray_kwargs.ray_init.runtime_env.env_vars.{VARIABLE}"
    OmegaConf.update(config, path, os.environ[VARIABLE], force_add=True)
    main_ppo.main(config)


if __name__ == "__main__":
    main()  # pyright: ignore[reportCallIssue] - hydra gives the configuration

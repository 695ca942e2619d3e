"""SkyRL's entry point with regions, which `trainer.override_entrypoint=trustrl.engines.skyrl` calls."""

import sys

from skyrl.train.config import make_config

from trustrl.engines.skyrl.losses import register
from trustrl.engines.skyrl.skyrl_config import RegionAlgorithmConfig, check_settings

OVERRIDE = "trainer.override_entrypoint="
"""SkyRL reads this argument and passes all arguments on, but its configuration does not have the field."""


def main() -> None:
    """Registers the regions, checks the settings, and runs SkyRL's `main_base`.

    Raises:
        ConfigError: If a setting does not work with the region, before Ray is started; see `check_settings`.
    """
    import ray
    from skyrl.train.entrypoints import main_base

    arguments = [argument for argument in sys.argv[1:] if not argument.startswith(OVERRIDE)]
    config = make_config(algorithm_cls=RegionAlgorithmConfig).from_cli_overrides(arguments)
    # Before Ray starts: `initialize_ray` carries the losses that are registered by then.
    register()
    check_settings(config)
    main_base.validate_cfg(config)
    main_base.initialize_ray(config)
    ray.get(main_base.skyrl_entrypoint.remote(config))

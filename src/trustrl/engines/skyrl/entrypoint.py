"""SkyRL's entry point with regions: what `trainer.override_entrypoint=trustrl.engines.skyrl` calls."""

import sys

from skyrl.train.config import make_config

from trustrl.engines.skyrl.losses import register
from trustrl.engines.skyrl.region import RegionAlgorithmConfig
from trustrl.engines.skyrl.settings import check_settings

OVERRIDE = "trainer.override_entrypoint="
"""SkyRL looks for this argument and hands all of them over; its configuration does not know it."""


def main() -> None:
    """Registers the regions, refuses what does not go with the one that was chosen, and hands over to SkyRL.

    Raises:
        ConfigError: before Ray is started; see `check_settings`.
    """
    import ray
    from skyrl.train.entrypoints import main_base

    arguments = [argument for argument in sys.argv[1:] if not argument.startswith(OVERRIDE)]
    config = make_config(algorithm_cls=RegionAlgorithmConfig).from_cli_overrides(arguments)
    register()
    check_settings(config)
    main_base.validate_cfg(config)
    main_base.initialize_ray(config)
    ray.get(main_base.skyrl_entrypoint.remote(config))

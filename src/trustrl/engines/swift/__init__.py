"""ms-swift's `GRPOTrainer` with a trust region: one import in a file for `--external_plugins`, and `TRUSTRL_REGION`.

Plugins of ms-swift act when they are imported. This one puts its trainer into `TrainerFactory.TRAINER_MAPPING`, from
which ms-swift imports it when training starts.
"""

import sys

from swift.trainers import TrainerFactory

from trustrl.errors import ConfigError

TRAINER = "trustrl.engines.swift.trainer.TrustRegionGRPOTrainer"


def install() -> None:
    """Makes ms-swift create the trainer with a region for `--rlhf_type grpo`.

    Raises:
        ConfigError: In a run of `megatron rlhf`, whose trainer would ignore the region.
    """
    if any(name in sys.modules for name in ("swift.megatron", "swift.ray.megatron")):
        raise ConfigError(
            "The trainer must be that of `swift rlhf` with a region, got `megatron rlhf`, which does not read "
            "TrainerFactory. Remove `import trustrl.engines.swift` from the plugin, or use `swift rlhf`."
        )
    TrainerFactory.TRAINER_MAPPING["grpo"] = TRAINER


install()

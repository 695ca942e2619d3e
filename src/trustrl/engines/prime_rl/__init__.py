"""prime-rl's policy loss with a trust region: `import_path = "trustrl.engines.prime_rl.region_loss"`.

Regions that read the sampler's most probable ids are in `trustrl.engines.prime_rl.vocabulary`, whose import extends
prime-rl's trainer.
"""

from trustrl.engines.prime_rl.losses import region_loss as region_loss

__all__ = ["region_loss"]

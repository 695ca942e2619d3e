"""SkyRL's policy losses with a trust region: `python -m trustrl.engines.skyrl` and one `policy_loss_type`.

SkyRL pickles the losses in its registry. A process that needs a loss unpickles it, which imports this package there. So
the import does not register anything; `register()` does, once, in the process that starts Ray.
"""

from trustrl.optional_imports import require

require("skyrl", advice="Install SkyRL 0.3.")

from trustrl.engines.skyrl.losses import main as main, register as register, registered as registered
from trustrl.engines.skyrl.skyrl_config import (
    RegionAlgorithmConfig as RegionAlgorithmConfig,
    check_settings as check_settings,
    region_of as region_of,
)

__all__ = ["RegionAlgorithmConfig", "check_settings", "main", "region_of", "register", "registered"]

"""SkyRL's policy losses with a trust region: `python -m trustrl.engines.skyrl` and one `policy_loss_type`.

SkyRL pickles what is in its registry, and a process that needs a loss unpickles it, which imports this package there.
So importing registers nothing; `register()` does, once, in the process that starts Ray.
"""

from trustrl.engines.skyrl.entrypoint import main as main
from trustrl.engines.skyrl.losses import register as register, registered as registered
from trustrl.engines.skyrl.region import RegionAlgorithmConfig as RegionAlgorithmConfig, region_of as region_of
from trustrl.engines.skyrl.settings import check_settings as check_settings

__all__ = ["RegionAlgorithmConfig", "check_settings", "main", "region_of", "register", "registered"]

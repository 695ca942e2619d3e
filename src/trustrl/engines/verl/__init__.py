"""verl's policy losses with a trust region: `VERL_USE_EXTERNAL_MODULES=trustrl.engines.verl` and one `loss_mode`.

Importing this package registers every region and the agent loops that record with verl, once, and adds the region's
check to verl's own `validate_config`, which its drivers call before they start Ray. A name that is taken, or a verl
that calls its losses in another way, raises: verl imports the modules of that variable in the driver and in every
worker and lets their errors through. (Its entry points do not: a plugin that fails there is only
logged at DEBUG.)
"""

from trustrl.engines.verl import agent_loop as agent_loop  # registers the loops that record
from trustrl.engines.verl.losses import register as register, registered as registered
from trustrl.engines.verl.region import RegionLossConfig as RegionLossConfig, region_of as region_of
from trustrl.engines.verl.settings import check_settings as check_settings, install_check as install_check
from trustrl.engines.verl.worker import RegionWorker as RegionWorker, install as install

__all__ = ["RegionLossConfig", "check_settings", "region_of", "register", "registered"]

register()
install()
install_check()

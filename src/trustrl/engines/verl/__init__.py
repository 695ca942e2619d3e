"""verl's policy losses with a trust region: `VERL_USE_EXTERNAL_MODULES=trustrl.engines.verl` and one `loss_mode`.

Importing this package registers every region, the recording agent loops and the recording servers of vLLM and SGLang
with verl, once. It also adds the region's check to verl's own `validate_config`, which verl's drivers call before they
start Ray. The import raises if a name is already registered, or if verl calls its losses in a different way. verl
imports the modules of that variable in the driver and in every worker, and does not catch their errors. (It does catch
the errors of its entry points: a plugin that fails there is only logged at DEBUG.)
"""

from trustrl.optional_imports import require

require("verl", advice='Run `pip install "trustrl[verl]"`.')

from trustrl.engines.verl import agent_loop as agent_loop  # registers the recording agent loops
from trustrl.engines.verl.losses import register as register, registered as registered
from trustrl.engines.verl.rollout_pieces import register_servers as register_servers
from trustrl.engines.verl.verl_config import (
    RegionLossConfig as RegionLossConfig,
    check_settings as check_settings,
    install_check as install_check,
    region_of as region_of,
)
from trustrl.engines.verl.worker import RegionWorker as RegionWorker, install as install

__all__ = ["RegionLossConfig", "check_settings", "region_of", "register", "registered"]

register()
install()
install_check()
register_servers()

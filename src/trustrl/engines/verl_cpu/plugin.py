"""What verl imports in every process: `VERL_USE_EXTERNAL_MODULES=trustrl.engines.verl_cpu.plugin`, before any other."""

import os
from importlib import import_module

from trustrl.engines.verl_cpu import platform, process_group, registry

platform.register()
registry.register()
if os.environ.get("VERL_PLATFORM") == platform.NAME:
    process_group.install()
    # verl's engines ask for the platform when they are imported.
    import_module("trustrl.engines.verl_cpu.engine").install()

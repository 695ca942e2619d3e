"""Old name of the package `trustrl_verl_cpu`: `python -m trustrl.engines.verl_cpu` warns and starts that package.

Importing it raises. Release 0.3 removes it.
"""

import sys
import warnings

from trustrl.errors import MissingPackageError
from trustrl.optional_imports import need

if __name__ != "__main__":
    raise MissingPackageError(
        "trustrl.engines.verl_cpu must be imported as trustrl_verl_cpu, its name since trustrl 0.2. Replace it in "
        "VERL_USE_EXTERNAL_MODULES and in your settings. If the package is missing, run "
        '`pip install "trustrl[verl-cpu]"`.',
        name="trustrl_verl_cpu",
    )

warnings.warn(
    "trustrl.engines.verl_cpu is now the package trustrl_verl_cpu, and trustrl 0.3 removes the old name. Run "
    "`python -m trustrl_verl_cpu`.",
    DeprecationWarning,
    stacklevel=1,
)
need("trustrl_verl_cpu.__main__", extra="verl-cpu").main(sys.argv[1:])

"""`triton.jit` for this package's kernels. Importing this module needs `triton`."""
# `triton` may not be installed where types are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any

import triton


def interpreted() -> bool:
    """Returns True if Triton's interpreter runs the kernels."""
    return bool(triton.knobs.runtime.interpret)


def jit(function: Callable[..., Any]) -> Any:
    """Returns `triton.jit(function)`, with a type that pyright can index and launch."""
    return triton.jit(function)

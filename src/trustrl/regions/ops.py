"""Operations that decisions are written with (`trustrl.core.ops`), imported on first use: settings load without torch.

A decision uses these and the methods and operators of tensors, so no region imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trustrl.core.ops import *  # noqa: F403


def __getattr__(name: str) -> Any:
    value = globals()[name] = getattr(import_module("trustrl.core.ops"), name)
    return value

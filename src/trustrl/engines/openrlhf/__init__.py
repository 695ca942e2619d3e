"""OpenRLHF's PPO trainer with a trust region: `python -m trustrl.engines.openrlhf` and one argument.

Importing this package imports neither OpenRLHF nor torch: Ray calls `install` in every worker process, also in those of
vLLM, which OpenRLHF keeps free of DeepSpeed.
"""

from typing import TYPE_CHECKING, Any

from trustrl.engines.openrlhf.worker_hook import install as install

if TYPE_CHECKING:
    from trustrl.engines.openrlhf.launcher import check_settings as check_settings, main as main
    from trustrl.engines.openrlhf.losses import RegionLoss as RegionLoss

__all__ = ["RegionLoss", "check_settings", "install", "main"]

_MODULES = {"RegionLoss": "losses", "check_settings": "launcher", "main": "launcher"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

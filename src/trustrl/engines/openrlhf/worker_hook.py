"""Replacement of four of OpenRLHF's classes at the moment when a process imports them.

A process that never imports them, such as vLLM's, imports nothing here either.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REPLACED_BY = {
    "openrlhf.trainer.ray.ppo_actor": "trustrl.engines.openrlhf.trainer",
    "openrlhf.trainer.ray.vllm_engine": "trustrl.engines.openrlhf.rollout_actor",
    "openrlhf.trainer.ppo_utils.experience_maker": "trustrl.engines.openrlhf.experience_maker",
}
"""Modules of OpenRLHF, each with the module that replaces a class in it when imported."""


def install() -> None:
    """Replaces OpenRLHF's trainer, its experience maker and its Ray actors by those with a region, in this process.

    Ray calls it in every worker process, as `worker_process_setup_hook`. Calling it again changes nothing.
    """
    for module, ours in REPLACED_BY.items():
        if module in sys.modules:
            import_module(ours)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # On import and not now: vLLM's workers run without DeepSpeed, which both modules import.
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the modules with the other finders, and lets `_Loader` import them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in REPLACED_BY:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Imports a module with its own loader, then the module that replaces a class in it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import_module(REPLACED_BY[module.__name__])

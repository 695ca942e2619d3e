"""Replacement of OpenRLHF's actor trainer at the moment when a process imports it.

A process that never imports the trainer, such as vLLM's, imports nothing here either.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PPO_ACTOR = "openrlhf.trainer.ray.ppo_actor"
TRAINER = "trustrl.engines.openrlhf.trainer"
"""Replaces OpenRLHF's trainer when it is imported."""


def install() -> None:
    """Makes `openrlhf.trainer.ray.ppo_actor.ActorPPOTrainer` the trainer with a region, in this process.

    Ray calls it in every worker process, as `worker_process_setup_hook`. Calling it again changes nothing.
    """
    if PPO_ACTOR in sys.modules:
        import_module(TRAINER)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # On import and not now: vLLM's workers run without DeepSpeed, which the trainer imports.
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the trainer's module with the other finders, and lets `_Loader` import it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PPO_ACTOR:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Imports a module with its own loader, then the module that replaces the trainer in it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import_module(TRAINER)

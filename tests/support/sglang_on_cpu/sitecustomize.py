"""On PYTHONPATH, this lets SGLang run next to a CPU build of torch, in every process that it and verl start.

PyPI's torchvision is a CUDA build. Its compiled part does not load without CUDA, and torchvision then fails as it
describes the operators of that part to torch. It imports once the operators have a schema. Nothing here calls them.

SGLang changes the way in which torch passes tensors of a GPU to another process, and fails on tensors of a CPU. Those
travel as names of shared memory: torch's default, file descriptors, is for processes of one parent.
"""

import importlib.abc
import sys
from functools import cache


@cache
def before_torchvision():
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


def on_patch_torch(module):
    from torch import multiprocessing

    module.monkey_patch_torch_reductions = lambda: multiprocessing.set_sharing_strategy("file_system")


class Finder(importlib.abc.MetaPathFinder):
    """Acts when a module is first imported, so that other processes need not load torch."""

    def find_spec(self, fullname, path, target=None):
        if fullname == "torchvision":  # others ask for it too, without importing it
            before_torchvision()
        if fullname != "sglang.srt.utils.patch_torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), on_patch_torch(module))
        return spec


sys.meta_path.insert(0, Finder())

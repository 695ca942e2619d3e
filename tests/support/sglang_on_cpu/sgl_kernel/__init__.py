"""Replaces `sglang-kernel`, which has no build without CUDA. Everything in it can be imported, and nothing called.

SGLang runs dense models on a CPU without these kernels: its layers use torch if the CPU has no AMX.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

__version__ = "0.4.10"


class Absent:
    """A name of the package. SGLang reads attributes of such names while it imports."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} is a CUDA kernel, and this machine runs SGLang without them.")


def absent_in(module):
    """Returns the `__getattr__` of a module of which every public name is absent."""

    def attribute(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{module}.{name}")

    return attribute


class Submodules(MetaPathFinder, Loader):
    def find_spec(self, fullname, path=None, target=None):
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = absent_in(module.__name__)


__getattr__ = absent_in(__name__)
sys.meta_path.append(Submodules())

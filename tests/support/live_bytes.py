"""Peak of the bytes of all tensors alive during a step, exact to the byte, without the allocator's rounding."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts tensors that operations create while it is entered, until their memory is freed.

    Args:
        counts: Returns whether a tensor counts.
    """

    def __init__(self, counts=lambda x: True):
        super().__init__()
        self.peak = 0
        self._counts = counts
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        self._alive = {key: pair for key, pair in self._alive.items() if not pair[0].expired()}
        for x in _tensors(out):
            if self._counts(x) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def _tensors(tree):
    """All tensors of a tree; of nested ones, their values."""
    return [x._values if x.is_nested else x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]

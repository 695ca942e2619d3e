"""What shows that no array of tokens × vocabulary is ever made."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor an operation returned; the insides of an operator of our own stay hidden."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and not func.is_view:
                self.elements = max(self.elements, x.numel())
        return out

"""Counts of what makes code slow on a GPU, taken on a CPU: waits for the device, kernels launched, copies from the host.

Each operation that reaches the dispatcher is one of: a view (free), a wait, or a kernel. The code runs as it does on an
accelerator: `free_to_look`, which allows shortcuts on a CPU, answers no.
"""

import collections
import contextlib
import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trustrl.kernels.vocab_pass_op as vocab_pass_op
from trustrl.core.regions import troll
from trustrl.kernels import devices

aten = torch.ops.aten

WAITS = {
    aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, aten.equal.default,
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
"""Operations whose result, or its shape, must be known on the host."""

INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
FROM_HOST = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
VIEWS = {
    "aten::t", "aten::slice.Tensor", "aten::select.int", "aten::unsqueeze", "aten::expand", "aten::detach",
    "aten::alias", "aten::transpose.int", "aten::permute", "aten::squeeze", "aten::squeeze.dim", "aten::unbind.int",
    "aten::split.Tensor", "aten::split_with_sizes", "aten::as_strided", "aten::empty.memory_format",
    "aten::numpy_T", "aten::promote_types", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided", "aten::diagonal",
}  # fmt: skip
"""Operations that launch nothing."""

OURS = {
    "trustrl::vocab_pass": vocab_pass_op.vocab_pass,
    "trustrl::vocab_pass_backward": vocab_pass_op.vocab_pass_backward,
}
"""Custom operators, counted by what they call."""


class Counts(TorchDispatchMode):
    """Counts while it is entered. Each counter maps a line of the package to a number."""

    def __init__(self):
        super().__init__()
        self.waits, self.copies, self.kernels = (collections.Counter() for _ in range(3))

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, operation.name()
        if name in OURS:
            with self:
                return OURS[name]._init_fn(*args, **kwargs)
        if operation in WAITS or (operation in INDEXED and _by_booleans(args[1])):
            self.waits[_line()] += 1
        elif operation in FROM_HOST:
            self.copies[_line()] += 1
        elif name not in VIEWS and "view" not in name:
            self.kernels[name] += 1
        return operation(*args, **kwargs)

    def __str__(self):
        lines = [
            f"{sum(self.waits.values())} waits, {sum(self.copies.values())} copies, {sum(self.kernels.values())} kernels"
        ]
        for title, counter in (("wait", self.waits), ("copy", self.copies), ("kernel", self.kernels)):
            lines += [f"{number:6d} {title} {where}" for where, number in counter.most_common(20)]
        return "\n".join(lines)


def _by_booleans(indices):
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _line():
    """The innermost line of the package that led here."""
    for frame in reversed(traceback.extract_stack()):
        if "/trustrl/" in frame.filename:
            return f"{frame.filename.split('/trustrl/')[-1]}:{frame.lineno} {frame.line}"
    return "outside"


@contextlib.contextmanager
def as_on_an_accelerator():
    """Runs the code that an accelerator runs: no shortcut reads a value."""
    found = {module: module.free_to_look for module in (troll, devices)}
    for module in found:
        module.free_to_look = lambda at: False
    try:
        yield
    finally:
        for module, looking in found.items():
            module.free_to_look = looking


@contextlib.contextmanager
def counted():
    """Counts everything inside, as on an accelerator."""
    with as_on_an_accelerator(), Counts() as counts:
        yield counts

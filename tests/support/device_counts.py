"""Counts of what makes code slow on a GPU, taken on a CPU: waits, copies from the host, kernels, bytes allocated.

Each operation that reaches the dispatcher is one of: a view (free), a wait, a copy from the host, or a kernel. A launch
of a Triton kernel is one kernel, under Triton's interpreter too. `x.cpu()` is one wait, and everything computed from
its result alone is free. The code runs as it does on an accelerator: `free_to_look`, which allows shortcuts on a CPU,
answers no. Code that `torch.compile` has compiled is not seen.
"""

import collections
import contextlib
import os
import sys
import traceback
from typing import NamedTuple

import torch
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from trustrl.core import numerics

aten = torch.ops.aten

WAITS = {
    aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, aten.equal.default,
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default, aten.bincount.default, aten.allclose.default,
}  # fmt: skip
"""Operations whose result, or its shape, must be known on the host."""

READS, COPIES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}, {torch.Tensor.cpu}
"""Calls that read a tensor on the host, and those that copy it there. On a CPU they reach no dispatcher."""

INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
FROM_HOST = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
NOTHING = {
    "aten::t", "aten::slice.Tensor", "aten::select.int", "aten::unsqueeze", "aten::expand", "aten::detach",
    "aten::alias", "aten::transpose.int", "aten::permute", "aten::squeeze", "aten::squeeze.dim", "aten::squeeze.dims",
    "aten::unbind.int", "aten::split.Tensor", "aten::split_with_sizes", "aten::as_strided", "aten::empty.memory_format",
    "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided", "aten::diagonal",
    "aten::promote_types", "aten::numpy_T",
}  # fmt: skip
"""Operations that launch nothing, besides those whose name contains "view" or starts with "prim::"."""


class Place(NamedTuple):
    """A line of a package."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self):
        return f"{self.file}:{self.line} {self.function}: {self.text}"


OUTSIDE = Place("outside", 0, "", "")


class Counts(TorchDispatchMode):
    """Counts while it is entered.

    Args:
        packages: The packages whose lines are named; the innermost one is.
    """

    def __init__(self, packages=("trustrl",)):
        super().__init__()
        self.waits, self.copies = collections.Counter(), collections.Counter()
        """By place."""
        self.kernels, self.allocated = collections.Counter(), collections.Counter()
        """Launches, and bytes of new tensors, by operation."""
        self.largest = 0
        """Bytes of the largest new tensor."""
        self._folders = {f"{os.path.dirname(sys.modules[name].__file__)}/": name for name in packages}
        self._inside_a_launch = False
        self._host = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, operation.name()
        if self._inside_a_launch:
            return operation(*args, **kwargs)
        if self.on_host((args, kwargs)):
            return self.to_host(operation(*args, **kwargs))
        if name in OPDEFS:  # a custom operator, counted by what it calls
            with self:
                return OPDEFS[name]._init_fn(*args, **kwargs)
        if _waits(operation, args, kwargs):
            self.waits[self._place()] += 1
        elif operation in FROM_HOST:
            self.copies[self._place()] += 1
        elif name not in NOTHING and "view" not in name and not name.startswith("prim::"):
            self.kernels[name] += 1
        made = operation(*args, **kwargs)
        self._allocate(name, (args, kwargs), made)
        return made

    def _allocate(self, name, given, made):
        known = {x.untyped_storage()._cdata for x in _tensors(given)}
        new = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in _tensors(made)}
        sizes = [size for storage, size in new.items() if storage not in known]
        self.allocated[name] += sum(sizes)
        self.largest = max(self.largest, *sizes, 0)

    def launch(self, name, run):
        """Counts one launch of a Triton kernel, and none of the operations by which the interpreter runs it."""
        self.kernels[f"triton::{name}"] += 1
        self._inside_a_launch = True
        try:
            return run()
        finally:
            self._inside_a_launch = False

    def read(self, x):
        """Counts one copy of a tensor to the host."""
        if not self.on_host(x):
            self.waits[self._place()] += 1

    def on_host(self, tree):
        """Returns whether there are tensors, and all of them have been copied to the host."""
        tensors = _tensors(tree)
        return bool(tensors) and all(x.untyped_storage()._cdata in self._host for x in tensors)

    def to_host(self, tree):
        """Notes that these tensors are on the host. Keeps their memory, whose address would be used again."""
        self._host |= {x.untyped_storage()._cdata: x.untyped_storage() for x in _tensors(tree)}
        return tree

    def _place(self):
        """Returns the innermost line of the packages, and the function that it is in, past comprehensions."""
        place = OUTSIDE
        for frame in reversed(traceback.extract_stack()):
            folder = next((folder for folder in self._folders if frame.filename.startswith(folder)), None)
            if folder is None:
                continue
            if place is OUTSIDE:
                file = f"{self._folders[folder]}/{frame.filename.removeprefix(folder)}"
                place = Place(file, frame.lineno, frame.name, frame.line)
            if not frame.name.startswith("<"):
                return place._replace(function=frame.name)
        return place

    def totals(self):
        """Returns the four numbers by name."""
        return {name: sum(getattr(self, name).values()) for name in ("waits", "copies", "kernels", "allocated")}

    def __str__(self):
        waits, copies, kernels, allocated = self.totals().values()
        lines = [f"{waits} waits, {copies} copies, {kernels} kernels, {allocated} bytes, {self.largest} in one tensor"]
        for title, counter in (("wait", self.waits), ("copy", self.copies), ("kernel", self.kernels)):
            lines += [f"{number:6d} {title} {where}" for where, number in counter.most_common(20)]
        return "\n".join(lines)


class _HostReads(TorchFunctionMode):
    """Sees the calls that reach no dispatcher on a CPU."""

    def __init__(self, counts):
        super().__init__()
        self._counts = counts

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in COPIES or (function is torch.Tensor.to and "cpu" in (*args[1:2], kwargs.get("device"))):
            self._counts.read(args[0])
            with _disable_current_modes():
                return self._counts.to_host(function(*args, **kwargs).clone())
        if function in READS:
            self._counts.read(args[0])
        return function(*args, **kwargs)


def _waits(operation, args, kwargs):
    if operation is aten.repeat_interleave.Tensor:
        return len(args) < 2 and kwargs.get("output_size") is None
    return operation in WAITS or (operation in INDEXED and _by_booleans(args[1]))


def _by_booleans(indices):
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and not x.is_nested]


@contextlib.contextmanager
def as_on_an_accelerator():
    """Makes `free_to_look` answer no, under every name that a module of the package has for it."""

    def exchange(one, other):
        for name, module in list(sys.modules.items()):
            if name.startswith("trustrl") and getattr(module, "free_to_look", None) is one:
                module.free_to_look = other

    def never(at):
        return False

    looks = numerics.free_to_look
    exchange(looks, never)
    try:
        yield
    finally:
        exchange(never, looks)


@contextlib.contextmanager
def _triton_launches(counts):
    """Reports every launch of a Triton kernel to `counts`, if Triton is installed."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return

    def counting(run):
        def launch(self, *args, **kwargs):
            if kwargs.get("warmup"):
                return run(self, *args, **kwargs)
            return counts.launch(self.fn.__name__, lambda: run(self, *args, **kwargs))

        return launch

    runs = {kernel: kernel.run for kernel in (JITFunction, InterpretedFunction)}
    try:
        for kernel, run in runs.items():
            kernel.run = counting(run)
        yield
    finally:
        for kernel, run in runs.items():
            kernel.run = run


@contextlib.contextmanager
def counted(*packages):
    """Counts everything inside, as on an accelerator. Names lines of trustrl, and of other packages if they are given."""
    counts = Counts(("trustrl", *packages))
    with as_on_an_accelerator(), _triton_launches(counts), _HostReads(counts), counts:
        yield counts

"""Records the torch calls of a function as a torch.fx graph, while the function runs on example tensors.

`torch.fx.symbolic_trace` passes proxies, on which code that reads a dtype or a device fails. Here the code runs on real
tensors, and each call of torch becomes a node. Python values that depend on the number of tokens would become constants
of the graph, so `recorded` runs the function at two lengths and compares.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from trustrl.errors import ConfigError

READS = {"__bool__", "__float__", "__int__", "__index__", "__contains__", "item", "tolist", "numpy"}
"""Tensor methods that turn a value of a tensor into a Python value."""

LENGTHS = (3, 5)

_ADVICE = "Use `loss_hook`, which runs the loss in your process."


def recorded(
    function: Callable[[Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]], names: tuple[str, ...], what: str
) -> fx.GraphModule:
    """Returns the function as a graph for any number of tokens.

    Args:
        function: Function of one row of float32 numbers for each name. Returns a scalar, and further scalars by name.
        names: Names of the graph's inputs, in order.
        what: The function's name in errors.

    Raises:
        ConfigError: If the function reads the value of a tensor, or depends on the number of tokens in Python.
    """
    graphs = [_one_graph(function, names, length, what) for length in LENGTHS]
    first, second = (str(graph) for graph in graphs)
    if first != second:
        raise ConfigError(
            f"The loss must be one graph for any number of tokens, got {what}, whose graph depends on it. {_ADVICE}"
        )
    return fx.GraphModule(torch.nn.Module(), graphs[0])


def _one_graph(function: Callable[..., Any], names: tuple[str, ...], length: int, what: str) -> fx.Graph:
    # Log-probs must be negative for a record to be valid; nothing else depends on the values.
    inputs = {name: torch.full((length,), -0.5) for name in names}
    recorder = _Recorder(inputs, what)
    with recorder:
        loss, metrics = function(inputs)
    nodes = {name: recorder.node(value) for name, value in metrics.items()}
    recorder.graph.output((recorder.node(loss), nodes))
    recorder.graph.eliminate_dead_code()
    recorder.graph.lint()
    return recorder.graph


class _Recorder(TorchFunctionMode):
    def __init__(self, inputs: Mapping[str, Tensor], what: str) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self._what = what
        # Keeps every tensor alive: a new one must not get the identity of a freed one.
        self._known = {id(x): (x, self.graph.placeholder(name)) for name, x in inputs.items()}

    def node(self, value: Any) -> Any:
        """Returns the node of a tensor, and other values as they are."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._known:
            raise ConfigError(
                f"The loss must compute one tensor in each call, got {self._what}, which does not. {_ADVICE}"
            )
        return self._known[id(value)][1]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in READS:
            raise ConfigError(
                f"The loss must not read the value of a tensor, got {self._what}, which calls {name}. {_ADVICE}"
            )
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            new_args = map_aggregate(args, self.node)
            new_kwargs = map_aggregate(dict(kwargs), self.node)
            if getattr(Tensor, name, None) == func:
                # torch gives `4 / x` the name of Python 2's operator, which torch.fx does not know.
                known = {"__rdiv__": "__rtruediv__"}.get(name, name)
                made = self.graph.call_method(known, new_args, new_kwargs)
            else:
                made = self.graph.call_function(func, new_args, new_kwargs)
            self._known[id(out)] = (out, made)
        return out

"""Functions whose second derivative raises instead of being wrong without a word.

Losses with a detached coefficient and kernels with a written-out gradient have no second derivative: their gradient is
a constant to autograd. If something else in the graph is differentiated twice, that constant would silently count as
0. torch's own `once_differentiable` raises only if the incoming gradient has a graph, and only if the caller asks for
all gradients.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

MESSAGE = (
    "The gradient of a trustrl loss must not be differentiated again, got a second derivative through it. "
    "Its coefficients are detached, so its Hessian would be wrong. Call backward() without create_graph=True, or "
    "leave this loss out of the term that you differentiate twice."
)


class _Refused(Function):
    """Identity on a gradient. Its own gradient raises."""

    @staticmethod
    def forward(gradient: Tensor, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        del inputs  # only their place in the graph counts
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(MESSAGE)


class _Once(Function):
    """Identity. The gradient of its gradient raises."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        if torch.compiler.is_compiling():
            # A compiled backward pass raises if it reads a tensor that has a gradient, so it must read x. Comparing x
            # with the gradient keeps the partitioner from reading it in the forward pass.
            return torch.where(ctx.saved_tensors[0] > gradient, gradient, gradient)
        return refused(gradient, *ctx.saved_tensors) if torch.is_grad_enabled() else gradient


def once(x: Tensor) -> Tensor:
    """Returns x. Its gradient raises if it is differentiated."""
    function: Any = _Once
    return function.apply(x) if x.requires_grad else x


def refused(gradient: Tensor, *inputs: Tensor) -> Tensor:
    """Returns the gradient as a function of the inputs whose derivative raises."""
    function: Any = _Refused
    return function.apply(gradient, *inputs)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `Function.backward` whose results raise if they are differentiated.

    The function must save the inputs that have a gradient with `ctx.save_for_backward`.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            results: tuple[Any, ...] = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # an ordinary backward pass
            return results
        known = [x for x in (*ctx.saved_tensors, *gradients) if isinstance(x, Tensor) and x.requires_grad]
        return tuple(refused(x, *known) if isinstance(x, Tensor) and known else x for x in results)

    return wrapped

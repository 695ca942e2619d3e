r"""TROLL's projection in one Triton launch, and its gradient in another.

    log π̂ = log b + β d − A(β),   d = log π − log b,   KL(π̂‖b) = bound

`core.projection` defines the projection and its gradient. As torch operations without waits it takes 32 evaluations
of KL(β) for every token, some 2,000 launches. Here a block of tokens stops when its last one has converged.

Cost per token outside the ball and evaluation: two exponentials and ten operations per cell. Memory beyond inputs and
results: none; the gradient computes the cells again.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from trustrl.kernels.derivatives import once_differentiable
from trustrl.kernels.id_columns import Columns
from trustrl.kernels.projection_kernels import project_backward_kernel, project_kernel
from trustrl.kernels.token_pass import WARPS, tile
from trustrl.kernels.triton_launch import dense


class ProjectInputs(NamedTuple):
    """Clean values of each token, without gradient."""

    log_policy: Tensor
    log_anchor: Tensor
    log_ratio: Tensor
    usable: Tensor
    anchor_tail: Tensor
    policy_tail: Tensor
    columns: Columns


class ProjectSettings(NamedTuple):
    """Numbers of the definition."""

    bound: float
    alpha: float
    slack: float
    tolerance: float
    tail_floor: float
    evaluations: int


def project(logp: Tensor, inputs: ProjectInputs, settings: ProjectSettings) -> tuple[Tensor, ...]:
    """Projects every token outside the ball. Differentiable in `logp`, the columns and the tail.

    Returns:
        The fields of `core.projection.ProjectedTokens`, in their order.
    """
    function: Any = _Project
    columns = inputs.columns
    projected, pull, outside, values = function.apply(logp, columns.own_logp, columns.own_tail_logp, inputs, settings)
    return projected, pull, outside, *values.unbind()


class _Project(Function):
    @staticmethod
    def forward(
        ctx: Any, logp: Tensor, own: Tensor, tail: Tensor | None, inputs: ProjectInputs, settings: ProjectSettings
    ) -> tuple[Tensor, ...]:
        n, width = own.shape
        device = own.device
        flags = torch.empty(2, n, dtype=torch.bool, device=device)
        values = torch.empty(6, n, dtype=torch.float64, device=device)
        projected, pull = torch.empty(2, n, dtype=logp.dtype, device=device).unbind()
        # Tensors, because Triton passes a Python float as float32.
        numbers = [values.new_full((), x) for x in (settings.bound, settings.alpha, settings.tolerance)]
        rows, padded = tile(width)
        with torch.cuda.device_of(own):
            project_kernel[(math.ceil(n / rows),)](
                logp.contiguous(), inputs.log_policy, inputs.log_anchor, inputs.log_ratio, inputs.usable,
                *dense(*inputs.columns._replace(own_logp=own)[:5]), inputs.anchor_tail, inputs.policy_tail, *numbers,
                values, *flags, projected, pull, n, width, SLACK=settings.slack, TAIL_FLOOR=settings.tail_floor,
                EVALUATIONS=settings.evaluations, NO_TAIL=inputs.columns.no_tail, ROWS=rows, COLUMNS=padded,
                num_warps=WARPS,
            )  # fmt: skip
        # Only β of the solution is saved. The backward pass computes the cells again and keeps none of them.
        ctx.save_for_backward(logp, own, tail, values[3], flags, numbers[1])
        ctx.inputs, ctx.settings = inputs, settings
        ctx.mark_non_differentiable(flags[0], values)
        return projected, pull, flags[0], values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logp, own, tail, beta, flags, alpha = ctx.saved_tensors
        inputs: ProjectInputs = ctx.inputs
        d_projected, d_pull = gradients[:2]
        n, width = own.shape
        d_logp = torch.empty_like(d_projected)
        d_own = torch.empty_like(own, memory_format=torch.contiguous_format)
        d_tail = None if tail is None else torch.empty_like(tail, memory_format=torch.contiguous_format)
        rows, padded = tile(width)
        with torch.cuda.device_of(own):
            project_backward_kernel[(math.ceil(n / rows),)](
                logp.contiguous(), inputs.log_policy, inputs.log_anchor, inputs.usable,
                *dense(*inputs.columns._replace(own_logp=own)[:5]), inputs.anchor_tail, inputs.policy_tail, alpha,
                beta, *flags, d_projected.contiguous(), d_pull.contiguous(), d_logp, d_own, d_tail, n, width,
                TAIL_FLOOR=ctx.settings.tail_floor,
                BY_SUBTRACTION=tail is None and not inputs.columns.no_tail, NO_TAIL=inputs.columns.no_tail, ROWS=rows,
                COLUMNS=padded, num_warps=WARPS,
            )  # fmt: skip
        return d_logp, d_own, d_tail, None, None

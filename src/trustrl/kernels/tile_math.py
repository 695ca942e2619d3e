r"""Arithmetic on one tile of logits, between the matrix products. `torch.compile` fuses it when a tile is large enough.

A tile holds the products in their own dtype, with −inf at the cells whose logits are computed separately. Either axis
may hold the tokens. The caller shapes per-token vectors so that they broadcast along the other axis.

    logit = cap(product + bias) · scale,   cap(x) = softcap · tanh(x / softcap),   scale = 1 / temperature

Eager torch makes a dozen passes over a tile, compiled code makes one. A compiler is not always available (on a CPU,
`torch.compile` needs a C++ compiler), and compiling does not pay off for small tiles, so every function runs both ways.
"""

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from trustrl.kernels import devices
from trustrl.kernels.logprob_outputs import wide_dtype

WORTH_COMPILING = 1 << 22
"""Smallest number of logits per call that runs compiled: about 50 ms of eager arithmetic on one core."""


def logits(product: Tensor, bias: Tensor | None, scale: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Returns (logits, ∂logit/∂product). A product of −inf stays −inf, even with a softcap."""
    wide = product.to(wide_dtype(product))
    shifted = wide if bias is None else wide + bias
    if softcap is None:
        return shifted * scale, scale
    bent = torch.tanh(shifted / softcap)
    z = torch.where(product == -torch.inf, -torch.inf, softcap * bent * scale)
    return z, (1 - bent.square()) * scale


def summary(
    product: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    softcap: float | None,
    shift: Tensor,
    dim: int,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (largest logit, largest |product|, Σ e, Σ e · x) along `dim`, where x = logit − shift and e = exp(x).

    If `weights` is given, also writes e · slope to it. Multiplied by the head, that is the gradient of Σ e.
    """
    z, slope = logits(product, bias, scale, softcap)
    x = z - shift
    e = torch.exp(x)
    if weights is not None:
        weights.copy_(e * slope)
    size = torch.where(product == -torch.inf, 0.0, product.abs().to(z.dtype))
    return z.amax(dim), size.amax(dim), e.sum(dim), torch.where(e > 0, e * x, 0.0).sum(dim)


def online_sums(
    product: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    softcap: float | None,
    dim: int,
    shift: Tensor,
    total: Tensor,
    moment: Tensor,
    largest: Tensor,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (shift, Σ e, Σ e · x, largest |product|, factor) with the tile included, under the largest logit so far.

    The factor converts earlier sums to the new shift. If `weights` is given, also writes e · slope to it.
    """
    z, slope = logits(product, bias, scale, softcap)
    higher = torch.maximum(shift, z.amax(dim))
    finite = torch.where(higher > -torch.inf, higher, 0.0)  # without a finite logit so far; makes e = 0
    moved = torch.where(shift > -torch.inf, shift - finite, 0.0)
    keep = torch.exp(moved)
    x = z - finite.unsqueeze(dim)
    e = torch.exp(x)
    if weights is not None:
        weights.copy_(e * slope)
    size = torch.where(product == -torch.inf, 0.0, product.abs().to(z.dtype))
    moment = (moment + moved * total) * keep + torch.where(e > 0, e * x, 0.0).sum(dim)
    return higher, total * keep + e.sum(dim), moment, torch.maximum(largest, size.amax(dim)), keep


def gradient(
    product: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    softcap: float | None,
    base: Tensor,
    on_mass: Tensor,
    on_log: Tensor,
    out: Tensor,
) -> None:
    r"""Writes the gradient of the loss with respect to the product to `out`, which may be the product.

    With q = exp(logit − base):   ∂/∂product = q · (on_mass − on_log · log q) · slope
    """
    z, slope = logits(product, bias, scale, softcap)
    log_q = z - base
    q = torch.exp(log_q)
    out.copy_(torch.where(q > 0, q * (on_mass - on_log * log_q), 0.0) * slope)


def dots(hidden_ND: Tensor, head_VD: Tensor, ids_NK: Tensor, product_dtype: torch.dtype) -> Tensor:
    """Returns hidden · head[id] for each given id, in float32 or better. The compiled form keeps no gathered rows."""
    wide = wide_dtype(hidden_ND)
    # Rounded to the products' dtype first: that is how the model defines its logits.
    return head_VD[ids_NK].to(product_dtype).to(wide).mul_(hidden_ND.to(wide).unsqueeze(1)).sum(-1)


def dots_by_blocks(hidden_ND: Tensor, head_VD: Tensor, ids_NK: Tensor, product_dtype: torch.dtype) -> Tensor:
    """Returns the same from blocks of rows, whose gathered head rows stay within a number of bytes.

    All of them would be [N, K, D] in float32: 17 GB for 16,384 tokens, 65 ids and a hidden size of 4,096.
    """
    rows = devices.gathered_rows(ids_NK, hidden_ND.shape[1], wide_dtype(hidden_ND))
    blocks = [slice(start, start + rows) for start in range(0, max(len(ids_NK), 1), rows)]
    return torch.cat([dots(hidden_ND[block], head_VD, ids_NK[block], product_dtype) for block in blocks])


def divergence_terms(log_p: Tensor, log_m: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (|m − p|, m (eˣ − 1 − x)) with x = log p − log m for each cell. Where m = 0, the second term is p."""
    p, m = torch.exp(log_p), torch.exp(log_m)
    x = torch.where(m > 0, log_p - log_m, 0.0)
    # Beyond x = 2 the difference no longer cancels, and eˣ may overflow although m eˣ = p does not.
    near = m * (torch.expm1(x.clamp(max=2.0)) - x)
    return (m - p).abs(), torch.where(m > 0, torch.where(x > 2.0, p - m - m * x, near), p)


def divergence_sums(
    policy: Tensor,
    anchor: Tensor,
    policy_bias: Tensor | None,
    anchor_bias: Tensor | None,
    scale: Tensor,
    softcap: float | None,
    policy_base: Tensor,
    anchor_base: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns both sums of `divergence_terms` over a tile [rows, columns] of each side's products."""
    log_p = logits(policy, policy_bias, scale, softcap)[0] - policy_base
    log_m = logits(anchor, anchor_bias, scale, softcap)[0] - anchor_base
    absolute, relative = divergence_terms(log_p, log_m)
    return absolute.sum(-1), relative.sum(-1)


class FusedFunction:
    """Function that runs compiled on large tiles. It runs as written on small tiles or if it cannot be compiled.

    `uncompiled` replaces the function there if the function as written needs too much memory.
    """

    def __init__(self, function: FunctionType, uncompiled: FunctionType | None = None) -> None:
        self.function, self.uncompiled = function, uncompiled or function
        self.compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.broken = False

    def __call__(self, *args: Any, large: bool) -> Any:
        """Returns the function's result, computed by compiled code if `large`."""
        if not large or self.broken:
            return self.uncompiled(*args)
        try:
            return self._compiled_for(args)(*args)
        except Exception as error:  # any error of the compiler toolchain; the plain call below raises genuine errors
            self.broken = True
            result = self.uncompiled(*args)
            warnings.warn(
                f"{self.function.__name__} could not be compiled ({type(error).__name__}). It runs uncompiled, about "
                "ten times slower. On a CPU, torch.compile needs a C++ compiler: install one, such as g++.",
                stacklevel=2,
            )
            return result

    def _compiled_for(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Returns the compiled copy for this kind of arguments.

        torch compiles a function for at most eight kinds of arguments, and then silently runs it uncompiled. A copy
        counts as a separate function.
        """
        kind = tuple(x.dtype if isinstance(x, Tensor) else x for x in args)
        if kind not in self.compiled:
            copy = FunctionType(self.function.__code__.replace(), self.function.__globals__, self.function.__name__)
            # torch leaves a parameter of `compile` untyped.
            self.compiled[kind] = torch.compile(copy, dynamic=True)  # pyright: ignore[reportUnknownMemberType]
        return self.compiled[kind]


fused_summary = FusedFunction(summary)
fused_online_sums = FusedFunction(online_sums)
fused_gradient = FusedFunction(gradient)
fused_dots = FusedFunction(dots, dots_by_blocks)
fused_divergence_sums = FusedFunction(divergence_sums)

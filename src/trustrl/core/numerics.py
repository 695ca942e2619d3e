"""Arithmetic near the edges of [0, 1], where the obvious code cancels or overflows.

Region verdicts are computed in float64. This costs a few operations per token, little next to a language model's
forward pass, and gives bf16, fp16 and fp32 inputs the verdict of exact arithmetic.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.kernels.devices import free_to_look as free_to_look


def verdict_dtype(like: Tensor) -> torch.dtype:
    """Returns float64, or float32 on MPS, the one backend without float64."""
    return torch.float32 if like.device.type == "mps" else torch.float64


def largest_exponent(dtype: torch.dtype) -> float:
    """Returns the largest x whose eˣ may enter a sum: the sum of 1e12 squares of eˣ stays finite in `dtype`.

    Example:
        >>> largest_exponent(torch.float32), largest_exponent(torch.float64)
        (30.0, 300.0)
    """
    return 30.0 if dtype == torch.float32 else 300.0


def either(
    condition: Bool[Tensor, "*batch"], yes: float | Tensor, no: float | Tensor, *, like: Tensor
) -> Float[Tensor, "*batch"]:
    """Returns `torch.where` of two Python numbers or tensors, in the dtype of `like`.

    `torch.where(condition, 0.3, 0.4)` returns float32, and a bound of 0.3 becomes 0.30000001.
    """
    yes, no = (x if isinstance(x, Tensor) else like.new_full((), x) for x in (yes, no))
    return torch.where(condition, yes, no)


def log1mexp(x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    r"""Returns log(1 − eˣ) for x ≤ 0, to full relative precision at both ends; −inf at 0.

    Example:
        >>> log1mexp(torch.tensor([-1e-12, -50.0], dtype=torch.float64))
        tensor([-2.7631e+01, -1.9287e-22], dtype=torch.float64)
    """
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def kl_term(log_b: Float[Tensor, "*batch"], log_p: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    r"""Returns one cell's share of KL(b‖p), in the form whose every term is ≥ 0.

        b log(b/p) − b + p,   which sums to KL because Σb = Σp = 1

    The extra −b + p cancels in the sum but not in the rounding: near-equal distributions give tiny positive numbers,
    whereas the plain sum is negative almost half of the time. 0·log 0 = 0; the result is +inf where p = 0 < b.
    """
    b = torch.exp(log_b)
    gap = (log_b - log_p).masked_fill(b == 0, 0.0)  # masked before the product, because 0 · inf is NaN
    return b * gap - b + torch.exp(log_p)

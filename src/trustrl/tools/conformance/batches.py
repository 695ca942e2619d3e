"""Small batches: the two log-probs of each sampled token, its advantage, and the loss mask."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

FIELDS = ("logp", "behavior_logp", "advantage")


@dataclass(frozen=True, slots=True)
class Batch:
    """Four matrices of shape rows × tokens."""

    logp: Tensor
    """log π, with respect to which the gradient is taken."""

    behavior_logp: Tensor
    """log μ."""

    advantage: Tensor
    in_loss: Tensor

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the loss."""
        return int(self.in_loss.sum())

    @property
    def num_sequences(self) -> int:
        """Number of rows with a token in the loss."""
        return int(self.in_loss.any(-1).sum())

    def rows(self, which: Any) -> "Batch":
        """Selects rows by slice or list."""
        return Batch(*(getattr(self, name)[which] for name in (*FIELDS, "in_loss")))

    def cut(self, rows: int, width: int) -> "Batch":
        """Selects the first rows and tokens."""
        return Batch(*(getattr(self, name)[:rows, :width] for name in (*FIELDS, "in_loss")))

    def put(self, field: str, value: float, where: Tensor) -> "Batch":
        """Returns a copy with `value` in `field` wherever `where` is True."""
        return replace(self, **{field: torch.where(where, value, getattr(self, field))})

    def to(self, dtype: torch.dtype) -> "Batch":
        """Converts the floating-point fields to another dtype."""
        return replace(self, **{name: getattr(self, name).to(dtype) for name in FIELDS})

    def padded(self, columns: int) -> "Batch":
        """Appends columns of zeros that are outside the loss."""
        return Batch(*(torch.nn.functional.pad(getattr(self, name), (0, columns)) for name in (*FIELDS, "in_loss")))


def healthy() -> Batch:
    """Returns a valid, nearly on-policy batch: rows of 6, 5, 3, and 6 tokens, one of them with a masked gap."""
    make = torch.Generator().manual_seed(0)
    behavior = torch.log(0.05 + 0.85 * torch.rand(4, 6, generator=make))
    logp = (behavior + 0.05 * torch.randn(4, 6, generator=make)).clamp(max=-1e-3)
    in_loss = torch.arange(6) < torch.tensor([[6], [5], [3], [6]])
    in_loss[3, 2] = False
    advantage = torch.tensor([[1.0], [-1.5], [0.5], [-0.5]]).expand(4, 6).clone()
    return Batch(logp, behavior, advantage, in_loss)


def on_policy() -> Batch:
    """Returns a batch with π = μ at every token and advantages of both signs and several sizes."""
    start = healthy()
    advantage = torch.tensor([[1.0], [-1.5], [0.5], [-0.5]]).expand(4, 6).clone()
    return Batch(start.behavior_logp, start.behavior_logp, advantage, torch.ones(4, 6, dtype=torch.bool))


def with_reference_token(
    *, policy: float, behavior: float, advantage: float, dtype: torch.dtype | None = None
) -> Batch:
    """Returns one token with these log-probs, and in a second row a reference token with π = μ and A = 1.

    The gradient of the reference token sets the scale.
    """
    reference = math.log(0.5)
    made = Batch(
        torch.tensor([[policy], [reference]]),
        torch.tensor([[behavior], [reference]]),
        torch.tensor([[advantage], [1.0]]),
        torch.ones(2, 1, dtype=torch.bool),
    )
    return made if dtype is None else made.to(dtype)

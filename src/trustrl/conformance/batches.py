"""Small batches: two log-probs of each sampled token, its advantage, and whether it is in the loss."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

FIELDS = ("logp", "behavior_logp", "advantage")


@dataclass(frozen=True, slots=True)
class Batch:
    """Four matrices of one shape, rows × tokens."""

    logp: Tensor
    """log π, where the gradient is taken."""

    behavior_logp: Tensor
    """log μ."""

    advantage: Tensor
    in_loss: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens in the loss."""
        return int(self.in_loss.sum())

    @property
    def num_sequences(self) -> int:
        """Rows with a token in the loss."""
        return int(self.in_loss.any(-1).sum())

    def rows(self, which: Any) -> "Batch":
        """Some of its rows, by slice or list."""
        return Batch(*(getattr(self, name)[which] for name in (*FIELDS, "in_loss")))

    def cut(self, rows: int, width: int) -> "Batch":
        """Its first rows and tokens."""
        return Batch(*(getattr(self, name)[:rows, :width] for name in (*FIELDS, "in_loss")))

    def put(self, field: str, value: float, where: Tensor) -> "Batch":
        """With `value` in `field` wherever `where` is True."""
        return replace(self, **{field: torch.where(where, value, getattr(self, field))})

    def to(self, dtype: torch.dtype) -> "Batch":
        """In another dtype."""
        return replace(self, **{name: getattr(self, name).to(dtype) for name in FIELDS})

    def padded(self, columns: int) -> "Batch":
        """With more columns outside the loss, filled with 0."""
        return Batch(*(torch.nn.functional.pad(getattr(self, name), (0, columns)) for name in (*FIELDS, "in_loss")))


def healthy() -> Batch:
    """Rows of 6, 5, 3 and 6 tokens, one of them with a hole, close to on-policy: nothing is wrong with it."""
    make = torch.Generator().manual_seed(0)
    behavior = torch.log(0.05 + 0.85 * torch.rand(4, 6, generator=make))
    logp = (behavior + 0.05 * torch.randn(4, 6, generator=make)).clamp(max=-1e-3)
    in_loss = torch.arange(6) < torch.tensor([[6], [5], [3], [6]])
    in_loss[3, 2] = False
    advantage = torch.tensor([[1.0], [-1.5], [0.5], [-0.5]]).expand(4, 6).clone()
    return Batch(logp, behavior, advantage, in_loss)


def on_policy() -> Batch:
    """π = μ at every token, advantages of both signs and several sizes."""
    start = healthy()
    advantage = torch.tensor([[1.0], [-1.5], [0.5], [-0.5]]).expand(4, 6).clone()
    return Batch(start.behavior_logp, start.behavior_logp, advantage, torch.ones(4, 6, dtype=torch.bool))


def beside_a_still_one(*, policy: float, behavior: float, advantage: float, dtype: torch.dtype | None = None) -> Batch:
    """One token given by its log-probs; in a row of its own a token that did not move, whose gradient is the scale."""
    still = math.log(0.5)
    made = Batch(
        torch.tensor([[policy], [still]]),
        torch.tensor([[behavior], [still]]),
        torch.tensor([[advantage], [1.0]]),
        torch.ones(2, 1, dtype=torch.bool),
    )
    return made if dtype is None else made.to(dtype)

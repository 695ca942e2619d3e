"""What a loss says to one batch: its value and its gradient, or the error it raised."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trustrl.conformance.adapters import Adapter
from trustrl.conformance.batches import Batch
from trustrl.errors import EngineError


@dataclass(frozen=True, slots=True)
class Answer:
    """A loss's answer, in float64; with an error the rest is empty."""

    value: float = 0.0
    gradient: Tensor = field(default_factory=lambda: torch.zeros(0))
    """∂loss/∂log π, in the batch's shape."""

    behavior_gradient: Tensor | None = None
    """∂loss/∂log μ where the batch asked for it."""

    error: str = ""

    @property
    def is_finite(self) -> bool:
        """No error, and neither value nor gradient holds NaN or an infinity."""
        return (
            not self.error and bool(torch.isfinite(torch.tensor(self.value))) and bool(self.gradient.isfinite().all())
        )

    def short(self) -> str:
        """In words, where something is wrong with it."""
        if self.error:
            return self.error
        broken = int((~self.gradient.isfinite()).sum())
        parts = [f"gradient not finite at {broken} of {self.gradient.numel()} tokens"] if broken else []
        if not torch.isfinite(torch.tensor(self.value)):
            parts.append(f"loss {self.value}" if broken else f"loss {self.value} beside a finite gradient")
        return ", ".join(parts) or f"loss {self.value:.4g}"


def ask(adapter: Adapter, batch: Batch, *, whole: Batch | None = None, of_behavior: bool = False) -> Answer:
    """The answer to a batch, or to a part of `whole`; nothing the loss raises gets out.

    Raises:
        EngineError: the loss returned something that is no loss.
    """
    logp = batch.logp.detach().clone().requires_grad_()
    behavior = batch.behavior_logp.detach().clone().requires_grad_(of_behavior)
    given = Batch(logp, behavior, batch.advantage.clone(), batch.in_loss.clone())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = _scalar(adapter.loss_of(given, whole or batch))
            if loss.requires_grad:
                loss.backward()
    except EngineError:
        raise
    except Exception as error:  # the loss is anyone's code: whatever it raises is its answer
        return Answer(error=f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    return Answer(float(loss.detach()), _or_zero(logp), _or_zero(behavior) if of_behavior else None)


def _scalar(found: Any) -> Tensor:
    loss = found[0] if isinstance(found, tuple | list) and found else found
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise EngineError(f"The loss must return a scalar tensor, or a tuple that begins with one, got {what}.")
    return loss.reshape(())


def _or_zero(leaf: Tensor) -> Tensor:
    return (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).double()

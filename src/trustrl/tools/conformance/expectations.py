"""Expectations of a policy loss, and the answers of a loss that they are checked against."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from trustrl.errors import EngineError
from trustrl.tools.conformance.adapters import Adapter
from trustrl.tools.conformance.batches import Batch

Verdict = Literal["passes", "fails", "differs", "tells"]
"""fails: contradicts plain arithmetic or the paper of its kind. differs: from a published default, or from a rule that
trustrl follows and others need not. tells: a measurement without a judgment."""

KINDS = ("any", "ppo", "dppo", "pg")
"""any: expected of every policy loss. ppo: a clipped ratio. dppo: a mask on a divergence. pg: masks nothing."""

WITH_A_TABLE = ("ppo", "dppo", "pg")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one check."""

    verdict: Verdict
    expected: str
    got: str = "as expected"


@dataclass(frozen=True, slots=True)
class Expectation:
    """One case of the corpus: its name, its reason, its check, and the kinds of loss it applies to."""

    name: str
    because: str
    check: Callable[[Adapter], Outcome]
    kinds: tuple[str, ...] = KINDS


def judged(holds: bool, expected: str, got: str, *, otherwise: Verdict = "fails") -> Outcome:
    """Returns `passes` if the expectation holds, else the verdict `otherwise` with the actual result."""
    return Outcome("passes", expected) if holds else Outcome(otherwise, expected, got)


@dataclass(frozen=True, slots=True)
class Answer:
    """Value and gradient of a loss on one batch, in float64, or the error it raised."""

    value: float = 0.0
    gradient: Tensor = field(default_factory=lambda: torch.zeros(0))
    """∂loss/∂log π, in the batch's shape."""

    behavior_gradient: Tensor | None = None
    """∂loss/∂log μ if it was requested."""

    error: str = ""
    """If set, the other fields are empty."""

    @property
    def is_finite(self) -> bool:
        """True if the loss did not raise, and value and gradient are finite."""
        return (
            not self.error and bool(torch.isfinite(torch.tensor(self.value))) and bool(self.gradient.isfinite().all())
        )

    def short(self) -> str:
        """Describes the problem with the answer, or its value if it has none."""
        if self.error:
            return self.error
        broken = int((~self.gradient.isfinite()).sum())
        parts = [f"gradient not finite at {broken} of {self.gradient.numel()} tokens"] if broken else []
        if not torch.isfinite(torch.tensor(self.value)):
            parts.append(f"loss {self.value}" if broken else f"loss {self.value} with a finite gradient")
        return ", ".join(parts) or f"loss {self.value:.4g}"


def ask(adapter: Adapter, batch: Batch, *, whole: Batch | None = None, of_behavior: bool = False) -> Answer:
    """Computes the answer to a batch, or to a part of `whole`. Errors that the loss raises become part of the answer.

    Raises:
        EngineError: If the loss does not return a scalar tensor.
    """
    logp = batch.logp.detach().clone().requires_grad_()
    behavior = batch.behavior_logp.detach().clone().requires_grad_(of_behavior)
    batch_copy = Batch(logp, behavior, batch.advantage.clone(), batch.in_loss.clone())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = _scalar(adapter.loss_of(batch_copy, whole or batch))
            if loss.requires_grad:
                loss.backward()
    except EngineError:
        raise
    except Exception as error:  # third-party code: whatever it raises is its answer
        return Answer(error=f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    return Answer(float(loss.detach()), _or_zero(logp), _or_zero(behavior) if of_behavior else None)


def _scalar(output: Any) -> Tensor:
    loss = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise EngineError(f"The loss must return a scalar tensor, or a tuple that begins with one, got {what}.")
    return loss.reshape(())


def _or_zero(leaf: Tensor) -> Tensor:
    return (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).double()

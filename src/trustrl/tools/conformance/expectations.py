"""Expectations of a policy loss: small batches of tokens, and the answers of a loss to them.

A batch has the two log-probs of each sampled token, its advantage, and the loss mask.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from trustrl.errors import EngineError

Verdict = Literal["passes", "fails", "differs", "tells"]
"""fails: contradicts plain arithmetic or the paper of its kind. differs: from a published default, or from a rule that
trustrl follows and others need not. tells: a measurement without a judgment."""

KINDS = ("any", "ppo", "dppo", "pg")
"""any: expected of every policy loss. ppo: a clipped ratio. dppo: a mask on a divergence. pg: masks nothing."""

WITH_A_TABLE = ("ppo", "dppo", "pg")

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
        """Selects rows by slice or list, or rows and tokens by a pair."""
        return Batch(*(getattr(self, name)[which] for name in (*FIELDS, "in_loss")))

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


class Adapter:
    """Calling convention of a loss."""

    takes: ClassVar[frozenset[str]] = frozenset()
    """Parameters that identify a function of this convention."""

    counts_are_global: bool = True
    """True if the loss receives the counts of the whole batch. If so, the losses of its parts must add up."""

    def __init__(self, loss: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        self._loss, self._settings = loss, dict(settings)

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """Calls the loss on `batch`, a part of `whole`, as its framework does."""
        raise NotImplementedError


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
    gradients = [(torch.zeros_like(x) if x.grad is None else x.grad).double() for x in (logp, behavior)]
    return Answer(float(loss.detach()), gradients[0], gradients[1] if of_behavior else None)


def _scalar(output: Any) -> Tensor:
    loss = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise EngineError(f"The loss must return a scalar tensor, or a tuple that begins with one, got {what}.")
    return loss.reshape(())

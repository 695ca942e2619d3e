"""One seam for every trainer that derives from TRL's `GRPOTrainer`: its own loss, run once with advantages of 0.

Seam:     `_get_per_token_logps_and_entropies(model, ...)`, which calls super(), and the trainer's loss, which the
          adapter runs through `_loss_parts`. `require_seam` checks their parameters, not the version of TRL
Borrowed: the whole loss. With tracked advantages of 0, the result contains only the trainer's other terms (KL to the
          reference, entropy, distillation). Its derivative with respect to the advantages is the factor that the
          trainer multiplies each token's loss by: its reduction, and its scaling for accumulation and ranks

`RegionState` keeps the region in the checkpoints of these trainers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.trainer_callback import TrainerCallback

from trustrl.config.axes import Region
from trustrl.engines.common import seam
from trustrl.engines.common.region_settings import warn_if_changed
from trustrl.engines.common.vocabulary_forward import gather_head, unrounded
from trustrl.errors import EngineError
from trustrl.regions.loading import config_to_dict

SCORE = "_get_per_token_logps_and_entropies"
"""The method in which trainers of this family compute the log-probs of the completion tokens."""

Score = Callable[..., tuple[Any, ...]]
"""That method: returns (log-probs, entropies or None, more in some releases)."""

# For type checkers, the mixin belongs to a trainer.
_Trainer: Any = object


class Asking(Protocol):
    """Model proxy that keeps the outputs of its calls."""

    outputs: list[Any]


class Seen(NamedTuple):
    """One captured forward pass."""

    logp: Tensor
    """(B, T): log-probs of the completion tokens, as the model returned them."""

    entropy: Tensor | None
    output: Any
    """The model's output if the region reads more of the vocabulary than the sampled token, else None."""


class LossParts(NamedTuple):
    """A trainer's loss, taken apart."""

    others: Tensor
    """The loss without its policy term."""

    weights: Tensor
    """(B, T): the factor that the trainer multiplies each token's loss by."""

    seen: Seen


class Capture:
    """The forward passes of one policy in one call of a trainer's loss.

    Args:
        model: The policy that is passed to the loss.
        ask: Makes a proxy of the model that requests or keeps more of its output; None for regions on the sampled
            token.
    """

    def __init__(self, model: Any, ask: Callable[[Any], Asking] | None = None) -> None:
        self.model = model
        self._ask = ask
        self._grad = torch.is_grad_enabled()
        self.seen: list[Seen] = []

    def run(self, score: Score, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls the trainer's own method and keeps its results."""
        gather_head(model)
        asking = None if self._ask is None else self._ask(model)
        # The caller enables gradients to read the reduction, also in evaluation. The model runs with the caller's
        # setting.
        with torch.set_grad_enabled(self._grad):
            logp, entropy, *more = score(asking or unrounded(model), *args, **kwargs)
        self.seen.append(Seen(logp, entropy, asking.outputs[0] if asking else None))
        # The region drops and counts tokens with a non-finite log-prob. They must not turn the other terms into NaN.
        return (torch.where(logp.isfinite(), logp, 0.0), entropy, *more)


class LossSeamMixin(_Trainer):
    """Mixin that takes a trainer's loss apart; an adapter puts it before the trainer in its bases."""

    _capture: Capture | None = None
    """The forward passes of the running loss, or None outside a loss."""

    _advantages_name = "inputs['advantages']"
    """The engine's name for the advantages, for errors."""

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Runs the trainer's own method, and captures the policy's log-probs while a loss runs."""
        score, capture = super()._get_per_token_logps_and_entropies, self._capture
        if capture is None or model is not capture.model:  # the reference model, or a rollout
            return score(unrounded(model), *args, **kwargs)
        return capture.run(score, model, *args, **kwargs)

    def _loss_parts(self, run: Callable[[Tensor], Tensor], capture: Capture, in_loss: Tensor) -> LossParts:
        """Returns the trainer's loss without its policy term, each token's factor in that term, and the captured pass.

        Args:
            run: Runs the trainer's own loss with these advantages, and with a ratio of 1 at every token.
            capture: Captures the policy's forward pass in that loss.
            in_loss: (B, T), True on tokens in the loss.

        Raises:
            EngineError: If the loss scores the policy more or less than once, or does not depend on the advantages.
        """
        advantages = torch.zeros(in_loss.shape, device=in_loss.device, requires_grad=True)
        self._capture = capture
        try:
            with torch.enable_grad():  # also in evaluation; the model itself runs with the caller's setting
                others = run(advantages)
        finally:
            self._capture = None
        if len(capture.seen) != 1:
            rule = f"compute the policy's log-probs with {SCORE}(model, ...) exactly once"
            raise self._broken_loss(rule, f"got {len(capture.seen)} calls")
        slope = None
        if others.requires_grad:
            (slope,) = torch.autograd.grad(others, advantages, retain_graph=True, allow_unused=True)
        if slope is None:
            raise self._broken_loss(f"depend on {self._advantages_name}", "and it does not")
        return LossParts(others, -slope, capture.seen[0])

    def _check_weights(self, weights: Tensor, in_loss: Tensor) -> None:
        """Checks the factors of the trainer's reduction. Waits for the device, so adapters call it once.

        Raises:
            EngineError: If a factor is impossible.
        """
        outside, inside = weights[~in_loss], weights[in_loss]
        if outside.any() or not inside.isfinite().all() or (inside < 0).any() or not inside.any():
            low, high = (inside.min().item(), inside.max().item()) if inside.numel() else (0.0, 0.0)
            rule = "multiply tokens in the loss by numbers ≥ 0 and the others by 0"
            raise self._broken_loss(rule, f"got {low:g} to {high:g} inside the loss")

    def _broken_loss(self, rule: str, got: str) -> EngineError:
        """Returns the error for a loss that does not do what the mixin relies on.

        Args:
            rule: The rule, as the end of "It must ...".
            got: The observation, as a clause.
        """
        return EngineError(
            f"The loss of {type(self).__name__} must {rule}, {got}. Install a version listed in trustrl's "
            "documentation."
        )


def require_seam(
    trainer: type, loss: str, takes: tuple[str, ...], scores: tuple[str, ...], *, package: str | None = None
) -> None:
    """Raises if a trainer's loss or its scoring method takes other parameters than the adapter was written for.

    Args:
        trainer: The engine's own trainer.
        loss: The name of its loss.
        takes: The parameters of the loss.
        scores: The first parameters of `_get_per_token_logps_and_entropies`.
        package: The distribution's name, if it differs from the name of the imported package.

    Raises:
        EngineError: If a method is missing or takes different parameters.
    """
    seam.require_parameters(trainer, loss, takes, package=package)
    seam.require_parameters(trainer, SCORE, scores, more=True, package=package)


REGION_KEY = "trustrl_region"
"""The key of the region in `trainer_state.json`, under `stateful_callbacks`."""


class RegionState(TrainerCallback):
    """Stores the region in `trainer_state.json`, and warns on resume if the region has changed.

    The versions of rollouts are the trainer's own step numbers, so the region has no other state.

    This is not one of transformers' exportable states. transformers restores those from a checkpoint if asked to, so
    the checkpoint's region would be compared with itself. It also cannot save a state that the checkpoint did not have.
    """

    def __init__(self, region: Region) -> None:
        self.settings = config_to_dict(region)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compares the region with the checkpoint's, if training resumes from one."""
        before = state.stateful_callbacks.get(REGION_KEY)
        state.stateful_callbacks[REGION_KEY] = self.settings
        warn_if_changed(before, self.settings, state.global_step)

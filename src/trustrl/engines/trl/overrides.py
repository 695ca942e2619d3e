"""Errors that name the class whose method does not do what the adapter relies on: TRL's trainer, or a subclass."""

import inspect
from typing import Any

from trustrl.errors import EngineError

_INSTALL = "Install a TRL version listed in trustrl's documentation."
_ADVICE = {
    "_compute_loss": (
        "With a region, it must call super()._compute_loss(model, inputs) once with the advantages that it received. "
        "It may add terms that do not depend on them. To write the whole loss yourself, call trustrl.policy_loss in it "
        "and leave TrustRegionMixin out."
    ),
    "_generate_and_score_completions": (
        "It must return everything that TRL's own _generate_and_score_completions returns. It may add to it."
    ),
}


def provider(trainer: type, method: str, *, after: type | None = None) -> type:
    """Returns the class that provides a method.

    Args:
        trainer: The trainer's class.
        method: The method's name.
        after: If given, only classes that follow this one in the method resolution order count, as for `super()`.
    """
    order = trainer.__mro__
    start = order.index(after) + 1 if after is not None else 0
    return next(cls for cls in order[start:] if method in vars(cls))


def is_trls(cls: type) -> bool:
    """Returns whether a class comes from TRL or from transformers, and not from a user."""
    return cls.__module__.split(".")[0] in ("trl", "transformers")


def broken(cls: type, method: str, rule: str, got: str) -> EngineError:
    """Returns the error for a method that does not do what the adapter relies on.

    Args:
        cls: The class that provides the method.
        method: One of the overridden methods.
        rule: The rule, as the end of "It must ...".
        got: The observation, as a clause.
    """
    if is_trls(cls):
        name = {"_compute_loss": "TRL's loss"}.get(method, "TRL's rollout")
        return EngineError(f"{name} must {rule}, {got}. {_INSTALL}")
    return EngineError(f"{cls.__name__}.{method} must {rule}, {got}. {_ADVICE[method]}")


def hides_the_region(trainer: type, mixin: type) -> type | None:
    """Returns the class in front of the mixin that overrides a loss, or None."""
    front: tuple[Any, ...] = trainer.__mro__[: trainer.__mro__.index(mixin)]
    return next((cls for cls in front if {"_compute_loss", "compute_loss"} & vars(cls).keys()), None)


def require_unpatched(trainer: type, mixin: type) -> None:
    """Raises if unsloth has replaced TRL's `compute_loss` by one that does not call `_compute_loss`, the region's seam.

    unsloth puts its own class in the place of `trl.GRPOTrainer`. Its loss reads hidden states and clips by itself.

    Raises:
        EngineError: If the region would be bypassed.
    """
    cls = provider(trainer, "compute_loss", after=mixin)
    if not cls.__name__.lstrip("_").startswith("Unsloth"):
        return
    loss: Any = inspect.unwrap(vars(cls)["compute_loss"])
    if "_compute_loss" not in loss.__code__.co_names:
        raise EngineError(
            f"TRL's loss must call _compute_loss with a region, and {cls.__name__}.compute_loss, which unsloth put in "
            "its place, does not: it would train with its own clip. Train without unsloth."
        )

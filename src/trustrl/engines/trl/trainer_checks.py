"""Checks on TRL's trainer: its settings, its model, the methods that subclasses override, and its first step."""

import inspect
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from trustrl.config.axes import Region
from trustrl.config.validators import one_of
from trustrl.engines.common import seam
from trustrl.engines.common.region_needs import Behavior
from trustrl.engines.refusals import rows
from trustrl.engines.refusals.trl import MODEL, SETTINGS
from trustrl.engines.trl import sampler
from trustrl.errors import EngineError


def check_settings(args: Any, region: Region, behavior: Behavior, **more: Any) -> None:
    """Raises if a setting bypasses the region, counts the mismatch twice, or makes a ratio of unlike log-probs.

    Args:
        args: TRL's `GRPOConfig`.
        region: The region.
        behavior: The source of μ.
        **more: Values that the rows read in addition to TRL's settings; see `trustrl.engines.refusals.trl`.

    Raises:
        ConfigError: If a setting is refused; names the setting and the fix.
    """
    one_of("behavior", behavior, ("sampler", "trainer"))
    on_cpu = bool(more.get("vllm_options")) and sampler.on_cpu()
    facts = {"behavior": behavior, "region": region, "trl": seam.version_of("trl"), "vllm_on_cpu": on_cpu, **more}
    rows.check(SETTINGS, rows.reader(args, **facts), region)


def check_model(trainer: Any, region: Region, *, output_layer: str | None) -> None:
    """Raises if the region cannot read the model or the set-up.

    Args:
        trainer: TRL's trainer, with its model.
        region: The region.
        output_layer: The kind of an output layer that is not a plain linear layer, or None.

    Raises:
        ConfigError: If the model or a setting is refused; names the setting and the fix.
    """
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    facts = {
        "The model's output layer": output_layer,
        "router_aux_loss_coef": trainer.router_aux_loss_coef if getattr(trainer, "aux_loss_enabled", False) else 0,
        "DeepSpeed's ZeRO stage": 3 if is_deepspeed_zero3_enabled() else None,
        "trl": seam.version_of("trl"),
        **{name: getattr(trainer.args, name, None) for name in ("top_p", "top_k", "min_p")},
    }
    rows.check(MODEL, rows.reader(facts), region)


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


class RegionActs(TrainerCallback):
    """Check after the first step that the region's loss ran.

    Args:
        trainer: The trainer.
        hidden_by: The class in front of `TrustRegionMixin` that overrides a loss, or None.
    """

    def __init__(self, trainer: Any, hidden_by: type | None) -> None:
        self._trainer = trainer
        self._hidden_by = hidden_by

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs the check.

        Raises:
            EngineError: If a whole step was trained without the region.
        """
        if self._trainer._num_losses == 0:
            by = "Something" if self._hidden_by is None else self._hidden_by.__name__
            raise EngineError(
                "The region's loss must run in every step, and it never ran. "
                f"{by} overrides `_compute_loss` or `compute_loss` in front of the region. Call super() in it, or "
                "write `class Mine(TrustRegionMixin, MyGRPOTrainer)` with the override in MyGRPOTrainer."
            )


class FollowsTheTrainer(TrainerCallback):
    """Check before the first step that vLLM follows the trainer's weights.

    The check scales the output layer, syncs the weights, compares the log-probs of sampler and trainer, and restores
    the layer. It uses the output layer because that is the weight that a sync misses if it is tied to the embedding.
    Costs three weight syncs and four small forward passes, once.
    """

    SCALE = 1.5

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs the check.

        Raises:
            EngineError: If the sampler did not follow.
        """
        from trustrl.engines.vllm.weight_reload import probe_gap

        generation = self._trainer.vllm_generation
        if generation.enable_sleep_mode or getattr(self._trainer.accelerator.state, "fsdp_plugin", None) is not None:
            return  # a sleeping sampler cannot score, and a sharded weight cannot be scaled here
        weight = self._trainer.model.get_output_embeddings().weight
        before = weight.detach().clone()
        generation.sync_weights()
        usual = probe_gap(generation).mean().item()
        try:
            with torch.no_grad():
                weight.mul_(self.SCALE)
            generation.sync_weights()
            changed = probe_gap(generation).mean().item()
        finally:
            with torch.no_grad():
                weight.copy_(before)
            generation.sync_weights()
        if not changed <= 3 * usual + 1e-3:
            raise EngineError(
                f"The sampler must follow the trainer's weights: with its output layer scaled by {self.SCALE:g} the "
                f"mean |Δ log p| must stay near {usual:.3g}, got {changed:.3g} nats. The weight did not reach the "
                "sampler. Check the weight sync, above all for tied embeddings. Set startup_checks=False to train "
                "without this check."
            )

"""Checks of TRL's settings against a region, at start-up."""

from typing import Any, Literal

from trustrl.config.axes import Region
from trustrl.config.checks import one_of
from trustrl.engines import refusals, seam
from trustrl.engines.trl_refusals import MODEL, SETTINGS

Behavior = Literal["sampler", "trainer"]
"""The source of μ: log-probs recorded by the sampler (vLLM, a `rollout_func`), or by the trainer itself, which is right
where transformers generates."""


def check_settings(args: Any, region: Region, behavior: Behavior, **more: Any) -> None:
    """Refuses settings that bypass the region, count the mismatch twice, or make a ratio of unlike log-probs.

    Args:
        args: TRL's `GRPOConfig`.
        region: The region.
        behavior: The source of μ.
        **more: What the rows ask for besides TRL's settings; see `trustrl.engines.trl_refusals`.

    Raises:
        ConfigError: with the setting and the fix.
    """
    one_of("behavior", behavior, ("sampler", "trainer"))
    facts = {"behavior": behavior, "region": region, "trl": seam.version_of("trl"), **more}

    def given(name: str, default: Any = None) -> Any:
        found = facts[name] if name in facts else getattr(args, name, None)
        return default if found is None else found

    refusals.check(SETTINGS, given, region)


def check_model(trainer: Any, region: Region, *, output_layer: str | None) -> None:
    """Refuses models and set-ups that the region cannot read.

    Args:
        trainer: TRL's trainer, with its model.
        region: The region.
        output_layer: The kind of an output layer that is not plainly linear, or None.

    Raises:
        ConfigError: with the setting and the fix.
    """
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    facts = {
        "model": "vision-language" if getattr(trainer, "_is_vlm", False) else None,
        "The model's output layer": output_layer,
        "router_aux_loss_coef": trainer.router_aux_loss_coef if getattr(trainer, "aux_loss_enabled", False) else 0,
        "DeepSpeed's ZeRO stage": 3 if is_deepspeed_zero3_enabled() else None,
        "trl": seam.version_of("trl"),
    }
    refusals.check(MODEL, refusals.reader(facts), region)

"""Checks on TRL's trainer: its settings, its model, and its first step."""

from typing import Any

from trustrl.config.axes import Region
from trustrl.config.statistics import Anchor
from trustrl.config.validators import one_of
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.engines.common import seam
from trustrl.engines.common.region_needs import Behavior
from trustrl.engines.common.step_check import check_initial_ratio
from trustrl.engines.refusals import rows
from trustrl.engines.refusals.trl import MODEL, SETTINGS
from trustrl.engines.trl import sampler


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

    def setting(name: str, default: Any = None) -> Any:
        value = facts[name] if name in facts else getattr(args, name, None)
        return default if value is None else value

    rows.check(SETTINGS, setting, region)


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


def check_first_loss(policy: PolicyTokens, rollout: RolloutTokens, anchor: Anchor, behavior: Behavior) -> None:
    """Raises if the anchor differs from the policy while the policy still has the rollout's weights.

    Raises:
        EngineError: If the log-probs differ; names the usual causes.
    """
    logp = rollout.behavior_logp if anchor == "behavior" else rollout.proximal_logp
    if logp is None or rollout.version is None:
        return
    recorded_by = "trainer" if anchor == "proximal" or behavior == "trainer" else "sampler"
    # Tokens of earlier weights differ from the policy, and should.
    mask = rollout.in_loss & (rollout.version == policy.version)
    check_initial_ratio(policy.logp, logp, mask, recorded_by, "startup_checks=False")

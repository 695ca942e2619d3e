"""AReaL: a region in place of the loss that its PPO actor passes to the training engine.

Seam:     `TrainEngine.train_batch(input_, loss_fn, loss_weight_fn)`, public; `PPOActor` passes it `grpo_loss_fn`
Switch:   `class Actor(RegionActor, FSDPPPOActor): region = "dppo-binary-tv-capped"`, for any engine class of AReaL
Borrowed: `loss_weight_fn`: a loss is the mean over a micro-batch's tokens, and AReaL weights micro-batches by tokens
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from areal.trainer.ppo import actor as ppo_actor
from areal.trainer.ppo.stats import infer_token_denominator
from areal.utils import stats_tracker
from areal.utils.constants import PROX_LOGP_METHOD_LOGLINEAR
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.config.statistics import Anchor
from trustrl.config.terms import TokenMean, TokenWeights
from trustrl.core.metrics import Choice, check_choice
from trustrl.core.records import RolloutTokens
from trustrl.engines.common import seam
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.common.sampled_loss import SampledLoss
from trustrl.engines.common.step_sums import averages
from trustrl.errors import ConfigError
from trustrl.regions.recommended import SAMPLED_TOKEN

CALLED_WITH = ("logprobs", "entropy", "input_data")

HOW: dict[Anchor, tuple[str, str]] = {
    "behavior": ('input_data["logprobs"]', "AReaL's workflows record them with every trajectory."),
    "proximal": ('input_data["prox_logp"]', "Call compute_logp before compute_advantages, as AReaL's trainer does."),
}

REFUSED = {
    "rejection_sampling": (None, "It multiplies or masks by π'/μ. Use a region with a correction, such as tis or mis."),
    "m2_threshold": (None, "It masks tokens before the region sees them."),
    "use_sapo_loss": (False, "It is another loss. Use the preset sapo."),
    "importance_sampling_level": ("token", "Use a region on sequences instead, such as trm-sampled."),
    "c_clip": (None, "Use the preset ppo with dual_clip."),
    "eps_clip_higher": (None, "Set the region's own bounds."),
}
"""Settings of AReaL's own loss, the value that each must have, and the reason."""


class RegionActor:
    """Mixin for AReaL's actor engines that trains with a region. Put it first among the bases.

    AReaL's workers import the class by its path, so define yours in a module.
    """

    region: Any = SAMPLED_TOKEN
    """A region, a preset's name, or a dictionary of settings."""

    metrics: Choice = "core"
    """The metrics to log: "core" for a few, "all" for every one that may be averaged."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        self._region_loss = RegionLoss(config, self.region, self.metrics)
        super().__init__(config, *args, **kwargs)  # pyright: ignore[reportCallIssue]: AReaL's engine comes next

    def train_batch(
        self, input_: Any, loss_fn: Callable[..., Tensor], loss_weight_fn: Callable[[dict[str, Any]], Tensor]
    ) -> dict[str, float]:
        """Runs the engine's own update with the region's loss instead of AReaL's `grpo_loss_fn`.

        Raises:
            ConfigError: If the actor passes another loss.
        """
        # AReaL binds its settings to the function with `functools.partial`.
        if getattr(loss_fn, "func", loss_fn) is not ppo_actor.grpo_loss_fn:
            raise ConfigError(
                f"loss_fn must be AReaL's grpo_loss_fn, got {loss_fn!r}. RegionActor replaces only that one."
            )
        return super().train_batch(input_, self._region_loss, loss_weight_fn)  # pyright: ignore[reportAttributeAccessIssue]


class RegionLoss:
    """Loss with the arguments of AReaL's `grpo_loss_fn`: the mean over a micro-batch's tokens.

    Args:
        config: AReaL's `PPOActorConfig`. It decides which policies `logprobs` and `prox_logp` are of.
        region: A region, a preset's name, or a dictionary of settings.
        metrics: See `RegionActor`.

    Raises:
        ConfigError: If a setting removes the region's anchor, counts the mismatch twice, or is another loss's.
        EngineError: If AReaL's loss takes other arguments.
    """

    def __init__(self, config: Any, region: Any, metrics: Choice = "core") -> None:
        seam.require_parameters(ppo_actor, "grpo_loss_fn", CALLED_WITH, more=True)
        self.region = region if isinstance(region, Region) else region_given(region, "region")
        check_choice(metrics)
        self.metrics: Choice = metrics
        for name, (wanted, why) in REFUSED.items():
            value = getattr(config, name)
            if value != wanted:
                raise ConfigError(f"actor.{name} must be {wanted}, got {value}. {why}")
        self._recorded = _anchors(config)
        self._sampled = SampledLoss("AReaL", {anchor: HOW[anchor] for anchor in self._recorded})
        try:
            self._sampled.check(self.region)
        except ConfigError as error:
            raise ConfigError(f"{error} {_mode(config)}") from None
        if self.region.needs().reduction is not None:
            raise ConfigError(
                f"The region must be defined for a mean over tokens, got {self.region.kind}, which averages over "
                "sequences. AReaL weights micro-batches by tokens. TRL and verl support it."
            )

    def __call__(self, logprobs: Tensor, entropy: Tensor, input_data: Mapping[str, Any], **more: Any) -> Tensor:
        """Returns the loss of one micro-batch and reports its statistics to AReaL's tracker.

        Raises:
            ConfigError: If the batch has a teacher's log-probs, whose loss AReaL adds in its own function.
            MissingDataError: If the region's anchor is missing.
        """
        if input_data.get("teacher_logp") is not None:
            raise ConfigError("teacher must be unset with a region, got teacher_logp. AReaL's own loss distills.")
        mask = input_data["loss_mask"].bool()
        anchors = {name: input_data.get(column) for name, column in self._recorded.items()}
        rollout = RolloutTokens(
            behavior_logp=anchors.get("behavior"),
            proximal_logp=anchors.get("proximal"),
            advantage=input_data["advantages"],
            in_loss=mask,
            sequence_ids=_sequence_ids(input_data, mask),
        )
        # AReaL weights micro-batches by their tokens, so each must return its own mean.
        weights = mask.to(torch.float64) / mask.count_nonzero().clamp(min=1)
        out = self._sampled(logprobs, rollout, self.region, TokenWeights(weights, like=TokenMean))
        stats_tracker.denominator(n_tokens=infer_token_denominator(input_data, mask), n_valid_tokens=mask)
        values = {"new_logp": logprobs.detach().float(), "entropy": entropy.detach().float()}
        stats_tracker.stat(**values, denominator="n_valid_tokens")
        stats_tracker.scalar(policy_loss=out.loss.detach().item(), **averages(out.sums, self.metrics))
        return out.loss


def check_sampling(gconfig: Any, actor: Any) -> None:
    """Raises if AReaL samples from another distribution than the actor computes.

    Args:
        gconfig: AReaL's `GenerationHyperparameters`.
        actor: AReaL's `PPOActorConfig`.

    Raises:
        ConfigError: If the sampler truncates or penalizes, or the two temperatures differ.
    """
    wanted = {"top_p": 1.0, "frequency_penalty": 0.0, "greedy": False, "temperature": actor.temperature}
    for name, value in wanted.items():
        setting = getattr(gconfig, name)
        if setting != value:
            raise ConfigError(f"gconfig.{name} must be {value}, got {setting}. μ would be another distribution than π.")
    if gconfig.top_k not in (-1, 0) and gconfig.top_k < 100_000_000:
        raise ConfigError(f"gconfig.top_k must be off, got {gconfig.top_k}. μ would be another distribution than π.")


def _anchors(config: Any) -> dict[Anchor, str]:
    """Returns the anchors that AReaL records with these settings, and their columns."""
    if config.use_decoupled_loss:
        if config.prox_logp_method == PROX_LOGP_METHOD_LOGLINEAR:
            return {"behavior": "logprobs"}
        return {"behavior": "logprobs", "proximal": "prox_logp"}
    # AReaL replaces the sampler's log-probs by the recomputed ones, or uses them for both.
    return {"proximal": "prox_logp"} if config.recompute_logprob else {"behavior": "logprobs"}


def _mode(config: Any) -> str:
    names = ("use_decoupled_loss", "recompute_logprob", "prox_logp_method")
    mode = ", ".join(f"actor.{name}={getattr(config, name)}" for name in names)
    return f"This run has {mode}; actor.use_decoupled_loss=True with prox_logp_method=recompute passes both."


def _sequence_ids(input_data: Mapping[str, Any], mask: Tensor) -> Tensor | None:
    """Returns the sequence of each packed token; None for a padded batch, whose rows are sequences."""
    ends = input_data.get("cu_seqlens")
    if mask.ndim != 1 or ends is None:
        return None
    index = torch.arange(len(mask), device=mask.device)
    return torch.bucketize(index, ends[1:].to(index), right=True)

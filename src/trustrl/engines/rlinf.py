"""RLinf: regions as its policy losses, registered in every worker.

Seam:     `register_policy_loss`, public; RLinf calls `register()` of the module in RLINF_EXT_MODULE in each worker
Switch:   `RLINF_EXT_MODULE=trustrl.engines.rlinf` and `algorithm.loss_type: trustrl-<preset>`
Borrowed: `loss_agg_func`, whose derivative is the factor on each token
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from rlinf.algorithms import registry
from rlinf.utils import utils
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.config.statistics import Anchor
from trustrl.config.terms import SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean, TokenWeights
from trustrl.core.metrics import Choice
from trustrl.core.records import RolloutTokens
from trustrl.engines.common import seam
from trustrl.engines.common.region_needs import more_than_sampled_tokens
from trustrl.engines.common.region_settings import PREFIX, region_given
from trustrl.engines.common.sampled_loss import SampledLoss, token_weights
from trustrl.engines.common.step_sums import averages
from trustrl.errors import ConfigError, DuplicateNameError
from trustrl.regions.presets import preset, presets

OLDEST = (0, 3)
REGION = "TRUSTRL_RLINF_REGION"
"""Environment variable that describes the region of `loss_type: trustrl`: a preset's name, or JSON."""

HOW: dict[Anchor, tuple[str, str]] = {
    "behavior": ("old_logprobs", "Set rollout.return_logprobs=true and algorithm.recompute_logprobs=false."),
    "proximal": ("old_logprobs", "Set algorithm.recompute_logprobs=true."),
}
AVERAGES: dict[Callable[..., Tensor], type] = {
    utils.masked_mean: TokenMean,
    utils.seq_mean_token_sum: SequenceMeanTokenSum,
    utils.seq_mean_token_mean: SequenceMeanTokenMean,
}


class RegionLoss:
    """Policy loss with RLinf's keyword arguments. Returns (scalar, metrics as tensors)."""

    def __init__(self, region: Region, metrics: Choice = "core") -> None:
        (anchor,) = sorted(region.needs().anchors)
        self.region, self.anchor = region, anchor
        self.metrics: Choice = metrics
        self.sampled = SampledLoss("RLinf", {anchor: HOW[anchor]})
        self.sampled.check(region)

    def __call__(
        self,
        *,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        loss_agg_func: Callable[..., Tensor],
        loss_mask: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of one micro-batch.

        Args:
            logprobs: The policy's log-probs, with gradient.
            old_logprobs: The region's anchor. RLinf passes the recomputed log-probs if it has them, else the sampler's;
                `check_settings` compares this with the region.
            advantages: The advantage of each token.
            loss_agg_func: RLinf's average.
            loss_mask: True on tokens in the loss; None for all tokens.
            more: RLinf's other settings. `clip_ratio_*` belong to its own losses.

        Raises:
            ConfigError: If the task is embodied, or a setting changes the ratio before the region sees it.
        """
        if more.get("task_type") == "embodied":
            raise ConfigError(
                "runner.task_type must not be embodied with a region, got embodied. The log-density of a continuous "
                "action may exceed 0, and regions here read log-probs of tokens."
            )
        for name in ("clip_log_ratio_min", "clip_log_ratio_max"):
            _refuse_unless(f"algorithm.{name}", more.get(name), (None,), "The region bounds the ratio itself.")
        mask = torch.ones_like(logprobs, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
        rollout = RolloutTokens(
            behavior_logp=old_logprobs if self.anchor == "behavior" else None,
            proximal_logp=old_logprobs if self.anchor == "proximal" else None,
            advantage=advantages,
            in_loss=mask,
        )
        weights = token_weights(lambda x: loss_agg_func(x, mask), logprobs)
        reduction = TokenWeights(weights, like=AVERAGES.get(loss_agg_func))
        out = self.sampled(logprobs, rollout, self.region, reduction)
        # RLinf stacks tensors, and its Megatron worker reads actor/ratio.
        all_averages = averages(out.sums, "all")
        shown = {"actor/policy_loss": out.loss.detach().item(), "actor/ratio": all_averages["trustrl/ratio_mean"]}
        shown |= averages(out.sums, self.metrics)
        return out.loss, {name: torch.tensor(x, device=logprobs.device) for name, x in shown.items()}


def register() -> None:
    """Registers every preset with one anchor as `trustrl-<preset>`, and `trustrl` if TRUSTRL_RLINF_REGION is set.

    RLinf calls it once in each worker.

    Raises:
        EngineError: If RLinf is too old or calls its losses in another way.
        DuplicateNameError: If one of the names is already registered.
    """
    seam.require_version("rlinf", OLDEST, "trustrl was not tested with older versions")
    seam.require_parameters(registry, "register_policy_loss", ("name",))
    for name in presets():
        region = preset(name)
        if not more_than_sampled_tokens(region) and len(region.needs().anchors) == 1:
            register_region(f"{PREFIX}-{name}", region)
    described = os.environ.get(REGION)
    if described:
        register_region(PREFIX, region_given(described, REGION))


def register_region(name: str, region: Region, *, metrics: Choice = "core") -> None:
    """Registers one region under a name for `algorithm.loss_type`, in this process.

    Raises:
        ConfigError: If the region reads both anchors or more than sampled tokens, or the name has capital letters.
        DuplicateNameError: If the name is already registered.
    """
    if len(region.needs().anchors) > 1:
        raise ConfigError(
            f"The region must read one anchor in RLinf, got {region.kind}, which reads both. RLinf passes a loss "
            "either the sampler's log-probs or the recomputed ones."
        )
    if name != name.lower():
        raise ConfigError(f"The name must be in lowercase, got {name!r}. RLinf would register {name.lower()!r}.")
    if name in registry.LOSS_REGISTRY:
        raise DuplicateNameError(f"RLinf's policy loss {name!r} is already registered. Choose another name.")
    registry.register_policy_loss(name)(RegionLoss(region, metrics))


def check_settings(cfg: Any) -> Region:
    """Checks RLinf's configuration against the region that `algorithm.loss_type` names. Call it before the run starts.

    Returns:
        The region.

    Raises:
        ConfigError: If a setting removes the anchor, counts the mismatch twice, or truncates μ.
    """
    region = getattr(registry.get_policy_loss(cfg.algorithm.loss_type), "region", None)
    if region is None:
        raise ConfigError(f"algorithm.loss_type must name a region, got {cfg.algorithm.loss_type!r}. Try trustrl-ppo.")
    algorithm, sampled = cfg.algorithm, "behavior" in region.needs().anchors
    twice = "It multiplies the advantages by π'/μ, which the region already contains or would not see."
    _refuse_unless("algorithm.importance_sampling_fix", algorithm.get("importance_sampling_fix"), (None, False), twice)
    only = "old_logprobs would be another policy's."
    _refuse_unless("algorithm.recompute_logprobs", bool(algorithm.get("recompute_logprobs")), (not sampled,), only)
    if sampled:
        _refuse_unless("rollout.return_logprobs", cfg.rollout.get("return_logprobs"), (True,), HOW["behavior"][1])
    for name in ("clip_log_ratio_min", "clip_log_ratio_max", "early_stop_imp_ratio"):
        _refuse_unless(f"algorithm.{name}", algorithm.get(name), (None,), "The region bounds the ratio itself.")
    _refuse_unless("runner.task_type", cfg.runner.task_type != "embodied", (True,), "Regions read tokens.")
    if region.needs().reduction is not None:
        _refuse_unless(
            "algorithm.loss_agg_func", algorithm.loss_agg_func, ("seq-mean-token-mean",),
            f"The gradient of {region.kind} is defined for that average.",
        )  # fmt: skip
    for where in ("algorithm", "rollout"):
        parameters = cfg[where].get("sampling_params") or {}
        for name, wanted in {
            "top_p": (1.0, None),
            "top_k": (-1, 0, 1_000_000, None),
            "repetition_penalty": (1.0, None),
        }.items():
            why = "μ would be another distribution than π. Sample from the whole vocabulary."
            _refuse_unless(f"{where}.sampling_params.{name}", parameters.get(name), wanted, why)
    return region


def _refuse_unless(setting: str, value: Any, wanted: tuple[Any, ...], why: str) -> None:
    if value not in wanted:
        raise ConfigError(f"{setting} must be {wanted[0]}, got {value}. {why}")

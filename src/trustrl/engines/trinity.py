"""Trinity-RFT: a region as one of its policy losses.

Seam:     `POLICY_LOSS_FN` and `ALGORITHM_TYPE`, registries that import a class by its dotted path in every process
Switch:   `algorithm.policy_loss_fn: trustrl.engines.trinity.RegionLoss` with `policy_loss_fn_args.region`
Borrowed: `aggregate_loss`, whose derivative is the factor on each token
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from trinity.algorithm import utils as aggregate_module
from trinity.algorithm.algorithm import GRPOAlgorithm
from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn
from trinity.algorithm.utils import aggregate_loss

from trustrl.config.axes import Region
from trustrl.config.statistics import Anchor
from trustrl.config.terms import SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean, TokenWeights
from trustrl.config.validators import one_of
from trustrl.core.metrics import Choice, check_choice
from trustrl.core.records import RolloutTokens
from trustrl.engines.common import seam
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.common.sampled_loss import SampledLoss, token_weights
from trustrl.engines.common.step_sums import averages
from trustrl.errors import ConfigError
from trustrl.regions.recommended import SAMPLED_TOKEN

AVERAGES: dict[str, type | None] = {
    "token-mean": TokenMean,
    "seq-mean-token-mean": SequenceMeanTokenMean,
    "seq-mean-token-sum": SequenceMeanTokenSum,
    "seq-mean-token-sum-norm": None,
}
"""Trinity's `loss_agg_mode`, and the reductions of the same name."""

ARGUMENTS = "algorithm.policy_loss_fn_args"


class RegionLoss(PolicyLossFn):
    """Policy loss whose `old_logprob` is the sampler's record, with Trinity's default `bypass_old_logprobs: true`."""

    _ANCHORS: ClassVar[Mapping[Anchor, tuple[str, str]]] = {
        "behavior": ("old_logprob", "Set algorithm.bypass_old_logprobs=true, so that it holds the sampler's.")
    }

    def __init__(
        self, backend: str = "verl", region: Any = None, loss_agg_mode: str | None = None, metrics: Choice = "core"
    ) -> None:
        super().__init__(backend=backend)
        seam.require_parameters(
            aggregate_module, "aggregate_loss", ("values", "mask", "loss_agg_mode", "normalizer"), package="trinity-rft"
        )
        self._sampled = SampledLoss("Trinity", self._ANCHORS)
        self.region: Region = region_given(region, f"{ARGUMENTS}.region")
        self._sampled.check(self.region)
        if loss_agg_mode is None:
            raise ConfigError(
                f"{ARGUMENTS}.loss_agg_mode must be given, got None. Write token-mean: Trinity then replaces it by "
                "algorithm.loss_agg_mode, and does not add it by itself."
            )
        one_of(f"{ARGUMENTS}.loss_agg_mode", loss_agg_mode, tuple(AVERAGES))
        check_choice(metrics, f"{ARGUMENTS}.metrics")
        wanted = self.region.needs().reduction
        if wanted is not None and AVERAGES[loss_agg_mode] is not wanted:
            raise ConfigError(
                f"algorithm.loss_agg_mode must be seq-mean-token-mean with {self.region.kind}, got {loss_agg_mode}. "
                "The region's gradient is defined for that average."
            )
        self._mode = loss_agg_mode
        self._metrics: Choice = metrics

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]: Trinity reads the names of the parameters
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor, **kwargs: Any
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns the loss of one micro-batch and its metrics."""
        return self._loss(logprob, old_logprob, None, advantages, action_mask)

    def _loss(
        self, logp: Tensor, behavior: Tensor | None, proximal: Tensor | None, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        # Trinity's tinker backend passes one sequence without a batch dimension.
        rows = [None if x is None else torch.atleast_2d(x) for x in (logp, behavior, proximal, advantages, mask)]
        logp, behavior, proximal, advantages, mask = rows  # pyright: ignore[reportAssignmentType]
        rollout = RolloutTokens(
            behavior_logp=behavior, proximal_logp=proximal, advantage=advantages, in_loss=mask.bool()
        )
        factors = token_weights(lambda x: aggregate_loss(x, mask, loss_agg_mode=self._mode), logp)
        reduction = TokenWeights(factors, like=AVERAGES[self._mode])
        out = self._sampled(logp, rollout, self.region, reduction)
        return out.loss, {"pg_loss": out.loss.detach().item(), **averages(out.sums, self._metrics)}

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Returns Trinity's defaults: the recommended region on the sampled token."""
        return {"region": SAMPLED_TOKEN, "loss_agg_mode": "token-mean"}


class RecomputedRegionLoss(RegionLoss):
    """Policy loss with both anchors, for `bypass_old_logprobs: false`: μ from `rollout_log_probs`, π' recomputed."""

    _ANCHORS: ClassVar[Mapping[Anchor, tuple[str, str]]] = {
        "behavior": ("rollout_log_probs", "The explorer must record log-probs with every experience."),
        "proximal": ("old_logprob", "Set algorithm.bypass_old_logprobs=false, so that the trainer recomputes them."),
    }

    def __init__(self, backend: str = "verl", *args: Any, **settings: Any) -> None:
        if backend != "verl":
            raise ConfigError(
                f"The backend must be verl with {type(self).__name__}, got {backend}. Trinity passes only the "
                "sampler's log-probs to a loss there. Use RegionLoss."
            )
        super().__init__(backend, *args, **settings)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]: Trinity reads the names of the parameters
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        rollout_log_probs: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns the loss of one micro-batch and its metrics."""
        return self._loss(logprob, rollout_log_probs, old_logprob, advantages, action_mask)


class RegionGRPO(GRPOAlgorithm):
    """Trinity's GRPO with checks of its settings against the region. Name it by its path in `algorithm_type`."""

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        """Returns GRPO's defaults with the region's loss."""
        return {**super().default_config(), "policy_loss_fn": f"{__name__}.RegionLoss"}

    @classmethod
    def check_config(cls, config: Any) -> None:
        """Raises if a setting removes an anchor, counts the mismatch twice, or truncates μ.

        Raises:
            ConfigError: If a setting is refused; names the setting and the fix.
        """
        super().check_config(config)
        check_settings(config)


def check_settings(config: Any) -> None:
    """Checks Trinity's configuration before the first step; `RegionGRPO` calls it.

    Raises:
        ConfigError: If a setting is refused; names the setting and the fix.
    """
    algorithm = config.algorithm
    name = algorithm.policy_loss_fn or f"{__name__}.RegionLoss"
    losses = {f"{__name__}.{each.__name__}": each for each in (RegionLoss, RecomputedRegionLoss)}
    one_of("algorithm.policy_loss_fn", name, tuple(losses))
    bypass = losses[name] is RegionLoss
    if algorithm.bypass_old_logprobs is not bypass:
        raise ConfigError(
            f"algorithm.bypass_old_logprobs must be {bypass} with {losses[name].__name__}, got "
            f"{algorithm.bypass_old_logprobs}. old_logprob would be another policy's."
        )
    if algorithm.rollout_correction:
        raise ConfigError(
            f"algorithm.rollout_correction must be unset, got {algorithm.rollout_correction}. The region bounds π/μ "
            "itself; use a region with a correction, such as tis."
        )
    sampler = getattr(config.explorer, "rollout_model", None)
    for where, owner in (("model", config.model), ("explorer.rollout_model", sampler)):
        for field, wanted in {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}.items():
            value = getattr(owner, field, None)
            if value is not None and value != wanted:
                raise ConfigError(
                    f"{where}.{field} must be {wanted}, got {value}. μ would be another distribution than π. Sample "
                    "from the whole vocabulary."
                )
    heat = getattr(sampler, "temperature", None)
    if heat is not None and heat != config.model.temperature:
        raise ConfigError(
            f"explorer.rollout_model.temperature must be model.temperature, {config.model.temperature}, got {heat}. π "
            "and μ would be computed at different temperatures."
        )

"""NeMo RL with a trust region: a loss function in place of `ClippedPGLossFn`.

Seam:     the argument `loss_fn` of `grpo_train`, `grpo_train_sync` and `async_grpo_train`, a `LossFunction`
Switch:   `loss_fn = with_region(loss_fn, master_config)` in the script that calls `setup` and the trainer
Settings: `loss_fn.trustrl_region`; NeMo RL's configuration of the loss takes further keys
Borrowed: `ClippedPGLossFn` with all advantages 0, which leaves its KL and likelihood terms and its metrics, and
          `masked_mean`, whose derivative is the factor on each token
"""

from typing import Any

import torch
from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl.algorithms.loss.interfaces import LossType, MetricNormalizer
from nemo_rl.algorithms.utils import masked_mean
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.config.terms import SequenceMeanTokenMean, TokenMean, TokenWeights
from trustrl.core.metrics import Choice, check_choice
from trustrl.core.records import RolloutTokens
from trustrl.engines.common import seam
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.common.sampled_loss import SampledLoss, token_weights
from trustrl.engines.common.step_sums import averages
from trustrl.engines.refusals.nemo_rl import ROWS
from trustrl.engines.refusals.rows import check, reader

CALLED_WITH = ("self", "next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks")
_SAMPLED = SampledLoss(
    "NeMo RL",
    {
        "behavior": ("generation_logprobs", "NeMo RL's generation records them; a custom rollout must do so too."),
        "proximal": ("prev_logprobs", "NeMo RL recomputes them unless loss_fn.force_on_policy_ratio is set."),
    },
)


class RegionLossFn(ClippedPGLossFn):
    """NeMo RL's policy loss with a region in place of its clip. Make it with `with_region`."""

    def __init__(self, config: ClippedPGLossConfig, region: Region, use_fused_linear_logprobs: bool = False) -> None:
        super().__init__(config, use_fused_linear_logprobs=use_fused_linear_logprobs)
        self.region = region
        self.metrics: Choice = getattr(config, "trustrl_metrics", "core")
        self.on_nonfinite: Any = getattr(config, "trustrl_on_nonfinite", "drop")

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the loss of one micro-batch, divided by NeMo RL's global counts, and its metrics.

        Args:
            next_token_logprobs: (B, T − 1) log-probs of the policy, with gradient.
            data: The micro-batch; tensors of shape (B, T), whose first column is not predicted.
            global_valid_seqs: Number of sequences of the global batch.
            global_valid_toks: Number of tokens in the loss of the global batch.

        Raises:
            KeyError: If the batch lacks `generation_logprobs` or `prev_logprobs`, which NeMo RL's own loss reads too.
        """
        # Advantages of 0 remove NeMo RL's policy term and its clip, and nothing else.
        others, metrics = super().__call__(
            next_token_logprobs,
            {**data, "advantages": torch.zeros_like(data["advantages"])},
            global_valid_seqs,
            global_valid_toks,
        )
        token_mask, sample_mask = data["token_mask"][:, 1:], data["sample_mask"]
        mask = token_mask * sample_mask.unsqueeze(-1)

        def reduce(loss: Tensor) -> Tensor:
            if self.loss_type == LossType.TOKEN_LEVEL:
                return masked_mean(loss, mask, global_normalization_factor=global_valid_toks)
            rows = masked_mean(loss, token_mask, dim=-1)
            return masked_mean(rows, sample_mask, global_normalization_factor=global_valid_seqs)

        like = TokenMean if self.loss_type == LossType.TOKEN_LEVEL else SequenceMeanTokenMean
        rollout = RolloutTokens(
            behavior_logp=data["generation_logprobs"][:, 1:],
            proximal_logp=data["prev_logprobs"][:, 1:],
            advantage=data["advantages"][:, 1:],
            in_loss=mask.bool(),
        )
        weights = token_weights(reduce, next_token_logprobs.detach())
        out = _SAMPLED(next_token_logprobs, rollout, self.region, TokenWeights(weights, like=like), self.on_nonfinite)
        loss = others + out.loss
        # NeMo RL adds metrics over micro-batches and ranks, so each carries its share of the global batch.
        share = (mask.sum() / global_valid_toks).item()
        told = {name: share * value for name, value in averages(out.sums, self.metrics).items()}
        self.metric_normalizations.update(dict.fromkeys(told, MetricNormalizer.TOKENS))
        return loss, {**metrics, **told, "loss": loss.item()}


def with_region(loss_fn: ClippedPGLossFn, master_config: Any) -> RegionLossFn:
    """Returns the loss of NeMo RL's `setup` with the region of `loss_fn.trustrl_region` in place of its clip.

    Args:
        loss_fn: The loss that `setup` returned.
        master_config: NeMo RL's whole configuration.

    Raises:
        ConfigError: If a setting does not work with the region; names the setting.
        EngineError: If this NeMo RL calls its losses in a way that trustrl does not support.
    """
    seam.require_parameters(ClippedPGLossFn, "__call__", CALLED_WITH, package="nemo_rl")
    config = master_config.loss_fn
    region = region_given(getattr(config, "trustrl_region", None), "loss_fn.trustrl_region")
    check_choice(getattr(config, "trustrl_metrics", "core"), "loss_fn.trustrl_metrics")
    _SAMPLED.check(region)
    check(ROWS, reader(master_config), region)
    return RegionLossFn(config, region, use_fused_linear_logprobs=loss_fn.use_fused_linear_logprobs)

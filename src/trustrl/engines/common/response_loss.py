"""A region as the loss of trainers that pass a list of responses and their logits: slime, and its fork miles.

Borrowed: the trainer's own functions of the logits and of the KL term, and its reduction, whose derivative is the
          factor on each token. The trainer divides by its counts afterwards, so the region does not.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.config.terms import SequenceMeanTokenMean, TokenMean, TokenWeights
from trustrl.core.metrics import check_choice
from trustrl.core.policy_loss import LossOutput
from trustrl.core.records import RolloutTokens
from trustrl.engines.common import seam
from trustrl.engines.common.region_needs import by_trainer
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.common.sampled_loss import SampledLoss, token_weights
from trustrl.engines.common.step_check import warn_if_it_cannot_act
from trustrl.engines.common.step_sums import averages
from trustrl.engines.refusals.rows import Given, check
from trustrl.engines.refusals.slime import ROWS

Reducer = Callable[[Tensor], Tensor]
Batch = Mapping[str, Any]

CALLED_WITH = ("args", "batch", "logits", "sum_of_sample_mean")
KL_WITH = ("log_probs", "log_probs_base", "kl_loss_type")


class ResponseLoss:
    """The custom loss of one trainer.

    Args:
        engine: The trainer's name.
        losses: The trainer's module of losses, which is imported when it is needed.
        log_probs: Calls that module's function of the logits, given the module, the trainer's arguments, a micro-batch,
            and the logits. Returns `log_probs`, and `entropy` if the trainer computes it, for each response.
        log_probs_with: The parameters of the module's `get_log_probs_and_entropy`.
        more: Whether that function may take further parameters.
    """

    def __init__(
        self,
        engine: str,
        losses: str,
        log_probs: Callable[[Any, Namespace, Batch, Tensor], Mapping[str, list[Tensor]]],
        log_probs_with: tuple[str, ...],
        *,
        more: bool = False,
    ) -> None:
        own = f"{engine}'" if engine.endswith("s") else f"{engine}'s"
        recorded = f"{own} rollout records them. A custom generate function must fill `Sample.rollout_log_probs`."
        recomputed = f"Remove --use-rollout-logprobs, with which {engine} does not recompute them."
        self._sampled = SampledLoss(
            engine, {"behavior": ("rollout_log_probs", recorded), "proximal": ("log_probs", recomputed)}
        )
        self._losses, self._log_probs = losses, log_probs
        self._log_probs_with, self._more = log_probs_with, more
        self.check_seams = cache(self._check_seams)

    def _check_seams(self) -> None:
        losses = import_module(self._losses)
        seam.require_parameters(losses, "policy_loss_function", CALLED_WITH)
        seam.require_parameters(losses, "get_log_probs_and_entropy", self._log_probs_with, more=self._more)
        seam.require_parameters(losses, "compute_approx_kl", KL_WITH, more=True)

    def check_arguments(self, args: Namespace) -> None:
        """Checks the arguments when the trainer starts: `--custom-megatron-init-path <module>.check_arguments`.

        Without it, the first micro-batch makes the same checks. Also warns if every ratio will be 1: one update per
        rollout, anchored on the trainer's own log-probs.

        Raises:
            ConfigError: If an argument is refused, or `trustrl_region` describes no region that the trainer can feed.
            EngineError: If the trainer calls its losses in a way that trustrl does not support.
        """
        self.check_seams()
        region = self._region(args)
        if by_trainer(region.needs(), "sampler"):
            warn_if_it_cannot_act(
                region,
                updates_per_batch=args.rollout_batch_size * args.n_samples_per_prompt / args.global_batch_size,
                remedy="Set --num-steps-per-rollout above 1, or the region's anchor to behavior.",
            )

    def _region(self, args: Namespace) -> Region:
        """Returns the region of the arguments, after a check of all of them."""
        region = region_given(getattr(args, "trustrl_region", None), "trustrl_region in --custom-config-path")
        check_choice(getattr(args, "trustrl_metrics", "core"), "trustrl_metrics")
        self._sampled.check(region)
        check(ROWS, flags(args), region)
        return region

    def region_loss(
        self, args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of one micro-batch before the trainer's division, and its metrics in the same units.

        Args:
            args: The trainer's arguments, with `trustrl_region` from `--custom-config-path`.
            batch: A micro-batch of the trainer; lists with one tensor per response.
            logits: (1, tokens, vocabulary of this rank) in float32, with gradient. In miles with `--qkv-format bshd`:
                (rows, longest, vocabulary of this rank).
            sum_of_sample_mean: The trainer's reduction of one value per response token to a number.

        Raises:
            ConfigError: See `check_arguments`.
            EngineError: See `check_arguments`.
            MissingDataError: If the region's anchor is missing.
        """
        self.check_seams()
        region, reduce, losses = self._region(args), sum_of_sample_mean, import_module(self._losses)
        outputs = self._log_probs(losses, args, batch, logits)
        logp = torch.cat(outputs["log_probs"])
        weights = token_weights(reduce, logp.detach())
        out = self._policy_loss(args, batch, region, outputs["log_probs"], weights)
        loss, terms = out.loss, {"pg_loss": out.loss}
        if "entropy" in outputs:
            terms["entropy_loss"] = reduce(torch.cat(outputs["entropy"]))
            loss = loss - args.entropy_coef * terms["entropy_loss"] if args.entropy_coef else loss
        if args.use_kl_loss:
            # Tokens outside the loss may hold infinities, which a factor of 0 would turn into NaN.
            policy, reference = (x.where(weights != 0, 0.0) for x in (logp, torch.cat(batch["ref_log_probs"])))
            terms["kl_loss"] = reduce(losses.compute_approx_kl(policy, reference, kl_loss_type=args.kl_loss_type))
            loss = loss + args.kl_loss_coef * terms["kl_loss"]
        if logp.numel() == 0:
            loss = loss + 0 * logits.sum()  # so that the backward pass reaches every parameter on every rank
        metrics = averages(out.sums, getattr(args, "trustrl_metrics", "core"))
        share = weights.sum()  # the trainer adds metrics and divides them by its counts, as it does losses
        return loss, {
            "loss": loss.detach().clone(),
            **{name: term.detach().clone() for name, term in terms.items()},
            **{name: share * value for name, value in metrics.items()},
        }

    def _policy_loss(
        self, args: Namespace, batch: Batch, region: Region, log_probs: list[Tensor], weights: Tensor
    ) -> LossOutput:
        lengths = torch.tensor([len(x) for x in log_probs], device=weights.device)
        logp = torch.cat(log_probs)
        rollout = RolloutTokens(
            behavior_logp=_joined(batch.get("rollout_log_probs"), logp),
            proximal_logp=_joined(batch.get("log_probs"), logp),
            advantage=torch.cat(list(batch["advantages"])).to(logp.dtype),
            in_loss=weights != 0,
            sequence_ids=torch.repeat_interleave(torch.arange(len(lengths), device=weights.device), lengths),
        )
        like = TokenMean if args.calculate_per_token_loss else SequenceMeanTokenMean
        mode: Any = getattr(args, "trustrl_on_nonfinite", "drop")  # `policy_loss` checks it
        return self._sampled(logp, rollout, region, TokenWeights(weights, like=like), mode)


def _joined(pieces: list[Tensor] | None, like: Tensor) -> Tensor | None:
    return torch.cat(list(pieces)).to(like.dtype) if pieces else None


def flags(args: Namespace) -> Given:
    """Returns a lookup of arguments by their flags: `--eps-clip` is `args.eps_clip`."""

    def given(flag: str, default: Any = None) -> Any:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
        return default if value is None else value

    return given

"""A region as the loss of trainers that pass a list of responses and their logits: slime, and its fork miles.

Borrowed: the trainer's own functions of the logits and of the KL term, and its reduction, whose derivative is the
          factor on each token. The trainer divides by its counts afterwards, so the region does not.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
from trustrl.engines.refusals.rows import Given, Refusal, check

Reducer = Callable[[Tensor], Tensor]
Batch = Mapping[str, Any]

CALLED_WITH = ("args", "batch", "logits", "sum_of_sample_mean")
KL_WITH = ("log_probs", "log_probs_base", "kl_loss_type")


def sampled_loss(engine: str) -> SampledLoss:
    """Returns the place of the loss in slime or miles, with the names that both give to the log-probs."""
    return SampledLoss(
        engine,
        {
            "behavior": (
                "rollout_log_probs",
                f"{_possessive(engine)} rollout records them. A custom generate function must fill "
                "`Sample.rollout_log_probs`.",
            ),
            "proximal": (
                "log_probs",
                f"Remove --use-rollout-logprobs, with which {engine} does not recompute them.",
            ),
        },
    )


def require_seams(losses: Any, log_probs_with: tuple[str, ...], *, more: bool = False) -> None:
    """Raises if the engine's own losses take other parameters than the adapter was written for.

    Args:
        losses: The engine's module of losses.
        log_probs_with: The parameters of its `get_log_probs_and_entropy`.
        more: Whether that function may take further parameters.

    Raises:
        EngineError: If a function is missing or takes different parameters.
    """
    seam.require_parameters(losses, "policy_loss_function", CALLED_WITH)
    seam.require_parameters(losses, "get_log_probs_and_entropy", log_probs_with, more=more)
    seam.require_parameters(losses, "compute_approx_kl", KL_WITH, more=True)


def _possessive(name: str) -> str:
    return f"{name}'" if name.endswith("s") else f"{name}'s"


@dataclass(frozen=True)
class ResponseLoss:
    """The custom loss of one trainer."""

    sampled: SampledLoss
    rows: Iterable[Refusal]
    """Rows of the arguments that the trainer must not have."""

    log_probs: Callable[[Namespace, Batch, Tensor], Mapping[str, list[Tensor]]]
    """The trainer's own function of the logits: `log_probs`, and `entropy` if the trainer computes it, for each
    response."""

    approx_kl: Callable[[Tensor, Tensor, str], Tensor]
    """The trainer's own KL estimate of each token, from the policy's and the reference's log-probs and a name."""

    def check_arguments(self, args: Namespace) -> Region:
        """Returns the region of the arguments, after a check of all of them.

        Raises:
            ConfigError: If an argument is refused, or `trustrl_region` describes no region that the trainer can feed.
        """
        region = region_given(getattr(args, "trustrl_region", None), "trustrl_region in --custom-config-path")
        check_choice(getattr(args, "trustrl_metrics", "core"), "trustrl_metrics")
        self.sampled.check(region)
        check(self.rows, flags(args), region)
        return region

    def warn_of_idle_region(self, args: Namespace, region: Region) -> None:
        """Warns if every ratio will be 1: one update per rollout, anchored on the trainer's own log-probs."""
        if by_trainer(region.needs(), "sampler"):
            warn_if_it_cannot_act(
                region,
                updates_per_batch=args.rollout_batch_size * args.n_samples_per_prompt / args.global_batch_size,
                remedy="Set --num-steps-per-rollout above 1, or the region's anchor to behavior.",
            )

    def __call__(
        self, args: Namespace, batch: Batch, logits: Tensor, reduce: Reducer
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of one micro-batch before the trainer's division, and its metrics in the same units.

        Raises:
            ConfigError: See `check_arguments`.
            MissingDataError: If the region's anchor is missing.
        """
        region = self.check_arguments(args)
        outputs = self.log_probs(args, batch, logits)
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
            terms["kl_loss"] = reduce(self.approx_kl(policy, reference, args.kl_loss_type))
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
        return self.sampled(logp, rollout, region, TokenWeights(weights, like=like), mode)


def _joined(pieces: list[Tensor] | None, like: Tensor) -> Tensor | None:
    return torch.cat(list(pieces)).to(like.dtype) if pieces else None


def flags(args: Namespace) -> Given:
    """Returns a lookup of arguments by their flags: `--eps-clip` is `args.eps_clip`."""

    def given(flag: str, default: Any = None) -> Any:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
        return default if value is None else value

    return given

"""The region's metrics in the log of a trainer that derives from TRL's: sums over micro-batches and ranks, as rates."""

import math
from typing import Any

import torch
from torch import Tensor

from trustrl.config.statistics import Anchor
from trustrl.core.diagnostics import Sums, rates
from trustrl.core.metrics import Choice, chosen
from trustrl.core.policy_loss import LossOutput
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.engines.common.replica_watch import ReplicaWatch
from trustrl.engines.common.step_check import (
    StepCheck,
    check_every_token_is_seen,
    warn_if_micro_batches_do_not_add_up,
)
from trustrl.engines.common.step_sums import on_host, over_ranks, share_of_one_rank
from trustrl.recording import Recorder

CLIP = "clip_ratio/"
"""The prefix of the trainers' own metrics for clipped shares. They are still logged, with the shares that the region
masked."""

UNSCORED = "frac_reward_nan"
"""Share of completions for which no reward function returned a number. TRL sets their advantage to 0."""


class StepMetrics:
    """Sums over one optimizer step, written as rates to the trainer's own metrics.

    The trainer averages its metrics over the steps between two logs. Within a step, nothing is averaged. Cost per step:
    two all-reduces of about 2,500 numbers in total, and one wait for the device.

    Args:
        check: The check of every training step's metrics. It always reads all of them.
        metrics: The metrics to log.
        startup_checks: Whether to check the first step's token weights.
        recorder: Records tokens; None records nothing.
        replicas: Compares the replicas of the sampler; None compares nothing.
    """

    def __init__(
        self,
        check: StepCheck,
        metrics: Choice,
        *,
        startup_checks: bool,
        recorder: Recorder | None = None,
        replicas: ReplicaWatch | None = None,
    ) -> None:
        self._sums: dict[str, Sums] = {}
        self._check = check
        self._metrics: Choice = metrics
        self._first_step = startup_checks
        self._recorder = recorder
        self._replicas = replicas

    def add(
        self,
        trainer: Any,
        out: LossOutput,
        policy: PolicyTokens,
        rollout: RolloutTokens,
        weights: Tensor,
        sequences: Tensor | None = None,
    ) -> None:
        """Adds one micro-batch. At the end of a step, writes the metrics.

        Args:
            trainer: The trainer, which holds the metrics in `_metrics`, and the region's needs in `_needs`.
            out: The result of the region's loss.
            policy: The policy's tokens.
            rollout: The rollout's tokens, packed. `sequence_ids` are rows of the micro-batch.
            weights: (B, T): the factor that the trainer multiplies each token's loss by. Over a step they must add up
                as in one average.
            sequences: The id of each token's sequence, if tokens are recorded.

        Raises:
            EngineError: If the trainer weighted tokens that the region did not see.
            NonFiniteError: If the step dropped more tokens than allowed.
        """
        mode = "train" if trainer.model.training else "eval"
        recorder = self._recorder if mode == "train" else None
        if recorder is not None:
            assert sequences is not None  # added to every training rollout
            recorder.add(out, policy, rollout, sequences=sequences, step=trainer.state.global_step)
        ranks, anchor = trainer.accelerator.num_processes, trainer._needs.anchor
        added = share_of_one_rank(out.sums, weights, ranks) + _extremes(out, policy, rollout, anchor, len(weights))
        if self._replicas is not None and mode == "train":
            added = added + self._replicas.sums(policy, rollout)
        weighted = weights != 0
        added.added["weighted"] = weighted.sum(dtype=torch.float64)
        added.added["rows_with_tokens"] = weighted.any(-1).double().mean() / ranks
        added.added["micro_batches"] = weights.new_full((), 1 / ranks, dtype=torch.float64)
        before = self._sums.get(mode)
        self._sums[mode] = added if before is None else before + added
        if trainer.accelerator.sync_gradients:
            self._end_step(trainer, mode, recorder)

    def _end_step(self, trainer: Any, mode: str, recorder: Recorder | None) -> None:
        total = on_host(over_ranks(self._sums.pop(mode)))
        check_every_token_is_seen(total)
        if recorder is not None:
            recorder.end_step(trainer.state.global_step, total)
        if self._first_step and mode == "train" and total.added["tokens"] > 0:
            filled = total.added["rows_with_tokens"] / total.added["micro_batches"]
            weight = total.added["loss_weight"].item()
            warn_if_micro_batches_do_not_add_up(trainer.args.loss_type, weight, filled.item())
            self._first_step = False
        metrics, more = rates(total), _clip_metrics(total)
        if mode == "train":
            self._check.check(metrics, total)
            if self._replicas is not None:
                more |= self._replicas.check(total, trainer.state.global_step)
        for name, value in {**chosen(metrics, self._metrics), **more}.items():
            trainer._metrics[mode][name].append(value)


def _extremes(out: LossOutput, policy: PolicyTokens, rollout: RolloutTokens, anchor: Anchor, rows: int) -> Sums:
    """Returns the masked shares of the least and the most masked sequence, as the trainers report them.

    Sequences without tokens do not count.
    """
    decision, on = out.decision, rollout.in_loss
    side = decision.side
    if side is None:
        logp = rollout.behavior_logp if anchor == "behavior" else rollout.proximal_logp
        assert logp is not None  # one of the region's needs
        side = policy.logp.detach() - logp
    masked = ~decision.keep & on & (rollout.advantage != 0)
    assert rollout.sequence_ids is not None
    flags = torch.stack([masked & (side < 0), masked & (side > 0), on]).float()
    low, high, length = flags.new_zeros(3, rows).index_add(1, rollout.sequence_ids, flags)
    low, high = low / length, high / length  # 0/0 is NaN
    return Sums({}, {f"{CLIP}low": _highest(-low), f"{CLIP}high": _highest(high)})


def _highest(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), -torch.inf, x).amax()


def clip_shares(sums: Sums) -> dict[str, float]:
    """Returns the shares that the region masked, under the trainers' own names."""
    tokens = max(float(sums.added["tokens"]), 1.0)
    names = {"low_mean": "masked/decrease", "high_mean": "masked/increase", "region_mean": "masked"}
    return {f"{CLIP}{name}": float(sums.added[key]) / tokens for name, key in names.items()}


def _clip_metrics(sums: Sums) -> dict[str, float]:
    """Returns these shares, and those of the least and the most masked sequence."""
    shares = clip_shares(sums)
    least, most = (float(sums.highest[f"{CLIP}{name}"]) for name in ("low", "high"))
    if math.isfinite(least):  # otherwise the step had no tokens
        shares |= {f"{CLIP}low_min": -least, f"{CLIP}high_max": most}
    return shares


class TrlMetrics:
    """Corrects the metrics that TRL's loss logs with advantages of 0."""

    def __init__(self) -> None:
        self._policy_losses: list[Tensor] = []
        """Of the step's micro-batches, on the device until the step ends."""

    def correct(self, trainer: Any, out: LossOutput) -> None:
        """Corrects the metrics of one micro-batch. Waits for the device at most once per step."""
        mode = "train" if trainer.model.training else "eval"
        for name, values in trainer._metrics[mode].items():
            if name.startswith(CLIP) and values:
                values.pop()  # the step's metrics have the region's
        if "policy_loss" not in trainer._metrics[mode]:
            return
        # With an entropy bonus TRL logs it, without the region, and before dividing by the accumulated steps.
        accumulated = trainer.current_gradient_accumulation_steps if mode == "train" else 1
        self._policy_losses.append(out.terms["policy"].float() * (1 if trainer.loss_type == "dapo" else accumulated))
        if trainer.accelerator.sync_gradients:
            own = torch.stack(self._policy_losses).unsqueeze(0)
            self._policy_losses.clear()
            logged = trainer._metrics[mode]["policy_loss"]
            for index, value in enumerate(trainer.accelerator.gather(own).nanmean(0).tolist(), start=-own.shape[1]):
                logged[index] += value

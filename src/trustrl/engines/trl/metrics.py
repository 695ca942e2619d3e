"""The region's metrics in TRL's own log stream: sums over a step's micro-batches and ranks, then rates."""

import math
from typing import Any

import torch
from torch import Tensor

from trustrl.config.statistics import Anchor
from trustrl.diagnostics import Sums, rates
from trustrl.engines.ranks import over_ranks, share_of_one_rank
from trustrl.engines.step_check import StepCheck
from trustrl.engines.trl import invariants
from trustrl.objective import LossOutput
from trustrl.recording import Recorder
from trustrl.records import PolicyTokens, RolloutTokens

CLIP = "clip_ratio/"
"""TRL's own names for stopped shares; they keep being logged, with what the region did."""


UNSCORED = "frac_reward_nan"
"""Share of completions for which no reward function gave a number: TRL's advantage for them is 0, whatever they say."""


class StepMetrics:
    """Adds up one optimiser step, then writes its rates where TRL keeps its own.

    TRL averages what it keeps over the steps between two logs; within a step nothing is averaged. Cost a step: two
    all-reduces of about 2,500 numbers in all, and one wait for the device.
    """

    def __init__(self, check: StepCheck, *, startup_checks: bool, recorder: Recorder | None = None) -> None:
        self._sums: dict[str, Sums] = {}
        self._check = check
        self._first_step = startup_checks
        self._recorder = recorder

    def add(
        self,
        trainer: Any,
        out: LossOutput,
        policy: PolicyTokens,
        rollout: RolloutTokens,
        weights: Tensor,
        sequences: Tensor | None = None,
    ) -> None:
        """Takes in one micro-batch; at the end of a step, writes.

        Args:
            trainer: whose metrics these are.
            out: what the region decided.
            policy: the policy's side.
            rollout: the sampler's side.
            weights: what TRL multiplies each token's loss with.
            sequences: the name of each row's sequence, where tokens are recorded.
        """
        mode = "train" if trainer.model.training else "eval"
        recorder = self._recorder if mode == "train" else None
        if recorder is not None:
            assert sequences is not None  # added to every training rollout
            recorder.add(out, policy, rollout, sequences=sequences, step=trainer.state.global_step)
        for name, values in trainer._metrics[mode].items():
            if name.startswith(CLIP) and values:
                values.pop()  # made by TRL from the watched advantages
        ranks, anchor = trainer.accelerator.num_processes, trainer._needs.anchor
        added = share_of_one_rank(out.sums, weights, ranks) + _extremes(out, policy, rollout, anchor)
        added.added["rows_with_tokens"] = rollout.in_loss.any(-1).double().mean() / ranks
        added.added["micro_batches"] = weights.new_ones(()).double() / ranks
        before = self._sums.get(mode)
        self._sums[mode] = added if before is None else before + added
        if "policy_loss" in trainer._metrics[mode]:
            # TRL logs it beside an entropy bonus: before it divides by the accumulated steps, and without the region.
            accumulated = trainer.current_gradient_accumulation_steps if mode == "train" else 1
            own = out.terms["policy"].float() * (1 if trainer.loss_type == "dapo" else accumulated)
            trainer._metrics[mode]["policy_loss"][-1] += trainer.accelerator.gather(own).nanmean().item()
        if trainer.accelerator.sync_gradients:
            total = over_ranks(self._sums.pop(mode))
            if recorder is not None:
                recorder.end_step(trainer.state.global_step, total)
            if self._first_step and mode == "train" and total.added["tokens"] > 0:
                filled = total.added["rows_with_tokens"] / total.added["micro_batches"]
                invariants.micro_batches_add_up(
                    trainer.args.loss_type, total.added["loss_weight"].item(), filled.item()
                )
                self._first_step = False
            found = rates(total)
            if mode == "train":
                self._check.look(found)
            for name, value in {**found, **_under_their_names(total)}.items():
                trainer._metrics[mode][name].append(value)


def _extremes(out: LossOutput, policy: PolicyTokens, rollout: RolloutTokens, anchor: Anchor) -> Sums:
    """The least and the most stopped sequence, as TRL reports them: sequences without tokens do not count."""
    decision, on = out.decision, rollout.in_loss
    side = decision.side
    if side is None:
        logp = rollout.behavior_logp if anchor == "behavior" else rollout.proximal_logp
        assert logp is not None  # among the region's needs
        side = policy.logp.detach() - logp
    advantage = rollout.advantage if rollout.advantage.ndim == 2 else rollout.advantage.unsqueeze(1)
    stopped = ~decision.keep & on & (advantage != 0)
    length = on.sum(-1)
    low, high = ((stopped & (sign * side > 0)).sum(-1) / length for sign in (-1, 1))  # 0/0 is NaN
    return Sums({}, {f"{CLIP}low": _highest(-low), f"{CLIP}high": _highest(high)})


def _highest(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), -torch.inf, x).amax()


def _under_their_names(sums: Sums) -> dict[str, float]:
    tokens = max(float(sums.added["tokens"]), 1.0)
    names = {"low_mean": "stopped/decrease", "high_mean": "stopped/increase", "region_mean": "stopped"}
    found = {f"{CLIP}{name}": float(sums.added[key]) / tokens for name, key in names.items()}
    least, most = (float(sums.highest[f"{CLIP}{name}"]) for name in ("low", "high"))
    if math.isfinite(least):  # otherwise there was no token
        found |= {f"{CLIP}low_min": -least, f"{CLIP}high_max": most}
    return found

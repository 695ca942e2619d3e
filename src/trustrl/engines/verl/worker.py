"""verl's actor worker with all that a region needs: both anchors, the vocabulary, and sums over a whole step.

Seams:    `ActorRolloutRefWorker.actor_worker_cls`, an attribute made for it; `TrainingWorker`'s `set_loss_fn`,
          `train_mini_batch`, `train_batch`, `save_checkpoint` and `load_checkpoint`, all calling super(); for regions
          on the vocabulary the engine's `prepare_model_inputs` and `prepare_model_outputs`, which call verl's for every
          other pass
Borrowed: everything else. verl's own `ppo_loss` runs with its KL and entropy terms, its metrics and its reduction, and
          finds the region's loss in its registry; what verl does not hand over travels beside it (`feed`)
Inert:    when `loss_mode` is none of ours
"""

import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

from trustrl.config.axes import Region
from trustrl.config.loading import config_to_dict
from trustrl.diagnostics import rates
from trustrl.engines import checkpoints, invariants, seam
from trustrl.engines.naming import is_ours
from trustrl.engines.ranks import share_of_one_rank
from trustrl.engines.step_check import MAX_DROPPED_SHARE, StepCheck
from trustrl.engines.verl import anchors
from trustrl.engines.verl.feed import Feed, feeding
from trustrl.engines.verl.layout import padded
from trustrl.engines.verl.metrics import StepSums, under_their_names
from trustrl.engines.verl.region import recording_of, region_of
from trustrl.engines.verl.settings import check_engine
from trustrl.engines.verl.vocabulary import VocabularyPass
from trustrl.errors import ConfigError
from trustrl.objective import LossOutput
from trustrl.recording import Recorder, sequence_ids
from trustrl.records import PolicyTokens, RolloutTokens


class RegionWorker(TrainingWorker):
    """A `TrainingWorker` whose policy loss may be any region."""

    _region: Region | None = None
    _vocabulary: VocabularyPass | None = None
    _recorder: Recorder | None = None
    _num_steps = 0
    """Training steps so far, a checkpoint's included: verl does not tell its workers."""

    @functools.wraps(TrainingWorker.set_loss_fn)  # with verl's mark of how to call it on a group of workers
    def set_loss_fn(self, loss_fn: Any) -> None:
        """Takes verl's loss; if its `loss_mode` is a region, makes ready for it."""
        config = getattr(loss_fn, "keywords", {}).get("config")
        policy_loss = getattr(config, "policy_loss", None)
        if policy_loss is None or not is_ours(policy_loss.get("loss_mode", "")):
            self._region = None
            super().set_loss_fn(loss_fn)
            return
        if "distillation_config" in loss_fn.keywords:
            raise ConfigError(
                "distillation must be off with a region, got both: they share the fields that carry a distribution."
            )
        self._region = region_of(policy_loss.loss_mode, policy_loss)
        self._needs = self._region.needs()
        self._first_loss = policy_loss.get("startup_checks", True)
        self._step = StepSums()
        self._check = StepCheck(
            self._region,
            max_dropped_share=policy_loss.get("max_dropped_share", MAX_DROPPED_SHARE),
            setting="policy_loss.max_dropped_share",
            speaks=self.rank == 0,
        )
        self._bypass = True
        self._vocabulary = None
        if self._needs.topk or self._needs.full:
            check_engine(
                self._region,
                strategy=self.engine_config.strategy,
                sequence_parallel=getattr(self.engine, "ulysses_sequence_parallel_size", 1),  # FSDP engines have one
                fused_kernels=self.engine_config.use_fused_kernels,
            )
            self._vocabulary = VocabularyPass.of(self.engine, self._needs)
        settings = recording_of(policy_loss)
        self._recorder = None
        if settings is not None and self.engine.is_mp_src_rank_with_outputs():  # the others hold the same tokens
            self._recorder = Recorder(settings, self._region, rank=self.rank)
        super().set_loss_fn(functools.partial(self._loss, loss_fn))

    @functools.wraps(TrainingWorker.train_mini_batch)
    def train_mini_batch(self, data: Any) -> Any:
        """One training step: records what the region needs, then verl's own updates."""
        if self._region is None:
            return super().train_mini_batch(data)
        anchors.check(self._needs, data)
        self._bypass = self._everywhere(anchors.bypassed(data))
        if anchors.own_forward(self._needs, bypass=self._bypass):
            if self._vocabulary is not None:
                self._vocabulary.remember_head()
            data.update(anchors.record(self, data, distribution=self._vocabulary is not None))
        if self._vocabulary is not None:
            tu.assign_non_tensor(data, **{anchors.PASS: "train"})
        self._step = StepSums()
        self._num_steps += 1
        if self._recorder is not None:
            rank = self.engine.get_data_parallel_rank()
            data["trustrl_sequence"] = sequence_ids(step=self._num_steps, rollout=0, rank=rank, count=len(data))
        out = super().train_mini_batch(data)
        total = self._step.total(self.engine.get_data_parallel_group())
        found = {} if total is None else rates(total) | under_their_names(total)
        if self._recorder is not None and total is not None:
            self._recorder.end_step(self._num_steps, total)
        if total is not None:
            self._check.look(found)
        if out is not None:
            metrics = tu.get(out, "metrics")
            tu.assign_non_tensor(out, metrics={**metrics, **{name: [value] for name, value in found.items()}})
        return out

    @functools.wraps(TrainingWorker.train_batch)
    def train_batch(self, data: Any) -> Any:
        """One update."""
        if self._region is not None:
            self._step.updates += 1
        return super().train_batch(data)

    @functools.wraps(TrainingWorker.save_checkpoint)
    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> Any:
        """verl's checkpoint, and the region beside it."""
        out = super().save_checkpoint(local_path, *args, **kwargs)
        if self._region is not None and self.rank == 0:
            checkpoints.write(Path(local_path), config_to_dict(self._region))
        return out

    @functools.wraps(TrainingWorker.load_checkpoint)
    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> Any:
        """verl's checkpoint; a region that is another one now is said aloud, by one rank."""
        # verl may delete the folder after loading.
        before = checkpoints.read(Path(local_path)) if local_path and self.rank == 0 else None
        out = super().load_checkpoint(local_path, *args, **kwargs)
        if local_path and (steps := re.findall(r"global_step_(\d+)", str(local_path))):
            self._num_steps = int(steps[-1])
        if self._region is not None and local_path:
            checkpoints.say_if_changed(before, config_to_dict(self._region), Path(local_path).parent.name)
        return out

    def _everywhere(self, fact: bool) -> bool:
        """Whether it holds on every rank: a forward pass that only some of them take would wait for ever."""
        group = self.engine.get_data_parallel_group()
        known = torch.tensor(int(fact), device=get_device_id())
        torch.distributed.all_reduce(known, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(known.item())

    def _loss(self, theirs: Any, *, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict]:
        """verl's loss of one micro-batch, with the region in it."""
        assert self._region is not None
        rollout: dict[str, Any] = {"token_ids": padded(data["responses"])}
        policy: dict[str, Any] = {}
        if self._vocabulary is not None:
            seen = self._vocabulary.take()
            rollout |= seen.rollout
            policy |= seen.policy
        elif "entropy" in model_output:
            policy["entropy"] = no_padding_2_padding(model_output["entropy"].detach(), data)
        feed = Feed(
            self._region,
            anchors.logps(data, bypass=self._bypass),
            functools.partial(self._take, data["dp_size"], data.get("trustrl_sequence", None)),
            rollout,
            policy,
        )
        with feeding(feed):
            return theirs(model_output=model_output, data=data, dp_group=dp_group)

    def _take(
        self,
        ranks: int,
        sequences: Tensor | None,
        out: LossOutput,
        policy: PolicyTokens,
        rollout: RolloutTokens,
        weights: Tensor,
    ) -> None:
        self._step.add(share_of_one_rank(out.sums, weights, ranks))
        if self._recorder is not None:
            assert sequences is not None
            update = max(self._step.updates - 1, 0)
            self._recorder.add(out, policy, rollout, sequences=sequences, step=self._num_steps, update=update)
        if self._first_loss and rollout.in_loss.any():
            anchor = self._needs.anchor
            logp = rollout.behavior_logp if anchor == "behavior" else rollout.proximal_logp
            assert logp is not None
            recorded_by = "sampler" if anchor == "behavior" else "trainer"
            invariants.ratio_is_one(policy.logp, logp, rollout.in_loss, recorded_by, "policy_loss.startup_checks=False")
            self._first_loss = False


def install() -> None:
    """Makes `RegionWorker` the actor of verl's workers.

    Raises:
        EngineError: verl's workers are called in another way than this adapter knows.
    """
    seam.require_parameters(TrainingWorker, "set_loss_fn", ("self", "loss_fn"))
    for name in ("train_mini_batch", "train_batch", "infer_batch"):
        seam.require_parameters(TrainingWorker, name, ("self", "data"))
    seam.require_parameters(FSDPEngineWithLMHead, "prepare_model_inputs", ("self", "micro_batch"))
    seam.require_parameters(
        FSDPEngineWithLMHead,
        "prepare_model_outputs",
        ("self", "output", "output_args", "micro_batch", "logits_processor_func"),
    )
    given = ActorRolloutRefWorker.actor_worker_cls
    if given is not TrainingWorker and not issubclass(given, RegionWorker):
        raise ConfigError(
            f"ActorRolloutRefWorker.actor_worker_cls must be verl's own, got {given!r}: somebody else has replaced it. "
            f"Derive that class from {RegionWorker.__module__}.RegionWorker."
        )
    if given is TrainingWorker:
        ActorRolloutRefWorker.actor_worker_cls = RegionWorker

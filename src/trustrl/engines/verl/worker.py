"""verl's actor worker with everything that a region needs: both anchors, the vocabulary, and sums over a whole step.

Seams:    `ActorRolloutRefWorker.actor_worker_cls`, an attribute intended for this, and its `update_weights`, which is
          called unchanged and numbers the weights that the sampler has; its `init_model`, for `batch_rows`;
          `TrainingWorker`'s `set_loss_fn`, `train_mini_batch`, `train_batch`, `save_checkpoint`, and
          `load_checkpoint`, which all call super(); for regions on the vocabulary the seams of `vocabulary_pass` or
          `megatron_pass`, which call verl's for every other pass
Borrowed: everything else. verl's own `ppo_loss` runs with its KL and entropy terms, its metrics, and its reduction, and
          finds the region's loss in its registry; `LossContext` passes the data that verl does not pass to a loss
Inert:    if `loss_mode` does not name a region. With `TRUSTRL_RECORD`, the tokens are recorded; see `batch_rows`
"""

import functools
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

from trustrl.config.axes import Region, reads_ages
from trustrl.core.diagnostics import rates
from trustrl.core.metrics import Choice, chosen
from trustrl.core.policy_loss import LossOutput
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.engines.common import region_settings, seam, stock_tokens
from trustrl.engines.common.replica_watch import ReplicaWatch
from trustrl.engines.common.sampler_fields import REPLICA
from trustrl.engines.common.step_check import MAX_DROPPED_SHARE, StepCheck, check_first_loss
from trustrl.engines.common.step_sums import StepSums, on_host, share_of_one_rank
from trustrl.engines.verl import anchors, batch_rows, first_update
from trustrl.engines.verl.batch_rows import SEQUENCE, name_sequences
from trustrl.engines.verl.losses import LossContext, active, clip_metrics
from trustrl.engines.verl.response_layout import every_response_token, taken
from trustrl.engines.verl.verl_config import check_engine, metrics_of, recording_of, region_of
from trustrl.engines.verl.vocabulary_pass import FSDPPass, VocabularyPass
from trustrl.errors import ConfigError, MissingDataError
from trustrl.recording import Recorder, Recording
from trustrl.recording.rank_writer import retire_rank
from trustrl.regions.loading import config_to_dict


class RegionWorker(TrainingWorker):
    """verl's `TrainingWorker` with support for every region as its policy loss."""

    _region: Region | None = None
    _metrics: Choice = "core"
    _vocabulary: VocabularyPass | None = None
    _recorder: Recorder | None = None
    _stock: batch_rows.StockRecord | None = None
    """Records a loss of verl's own; None if a region trains or nothing is recorded."""

    _reuses_first_pass = True
    """True if π' of the first update may be taken from its own forward pass; see `first_update`."""

    _own_anchor = False
    """True from the start of a batch to the end of its first update, if its π' is."""

    _truncated = False
    """True if tokens are drawn from a part of the vocabulary."""

    _silent: Recording | None = None
    """Settings of a recording in which another rank holds this one's tokens, before the first step."""

    _num_steps = 0
    """The number of training steps, including those of a checkpoint. verl does not pass it to its workers."""

    @functools.wraps(TrainingWorker.set_loss_fn)  # keeps verl's mark of how to call it on a group of workers
    def set_loss_fn(self, loss_fn: Any) -> None:
        """Sets verl's loss. If its `loss_mode` names a region, prepares this worker for the region.

        Raises:
            ConfigError: If a setting does not work with the region.
        """
        self._sent: dict[int, int] = {}
        config = getattr(loss_fn, "keywords", {}).get("config")
        policy_loss = getattr(config, "policy_loss", None)
        if policy_loss is None or not region_settings.is_region_name(policy_loss.get("loss_mode", "")):
            self._region = None
            super().set_loss_fn(self._recorded(loss_fn, policy_loss))
            return
        if "distillation_config" in loss_fn.keywords:
            raise ConfigError(
                "distillation must be off with a region, got both. They share the fields that carry a distribution. "
                "Set distillation.enabled=False."
            )
        self._region = region_of(policy_loss.loss_mode, policy_loss)
        self._needs = self._region.needs()
        self._metrics = metrics_of(policy_loss)
        self._first_loss = policy_loss.get("startup_checks", True)
        self._step = StepSums()
        # The first rank that computes a loss; with pipeline stages, not rank 0.
        speaks = self.engine.is_mp_src_rank_with_outputs() and self.engine.get_data_parallel_rank() == 0
        self._check = StepCheck(
            self._region,
            max_dropped_share=policy_loss.get("max_dropped_share", MAX_DROPPED_SHARE),
            setting="policy_loss.max_dropped_share",
            warns=speaks,
        )
        self._replicas = ReplicaWatch(
            policy_loss.get("on_stale_replica", "warn"), setting="policy_loss.on_stale_replica", warns=speaks
        )
        self._bypass = True
        self._vocabulary = None
        self._truncated = policy_loss.get("max_kept", None) is not None
        check_engine(self._region, policy_loss, self.engine_config, self.model_config)
        megatron = "trustrl.engines.verl.megatron_pass"  # imported where it runs: Megatron may not be installed
        on_megatron = self.engine_config.strategy == "megatron"
        if self._needs.topk or self._needs.full or self._truncated:
            kind: type[VocabularyPass] = import_module(megatron).MegatronPass if on_megatron else FSDPPass
            self._vocabulary = kind.of(self.engine, self._needs, truncated=self._truncated)
        if speaks and on_megatron:
            import_module(megatron).warn_of_padding(self.engine)
        self._stock = None
        self._recorder = self._recorder_of(recording_of(policy_loss) or self._asked(config), policy_loss)
        # verl's loss runs inside: its KL and entropy terms and the names of its metrics would be lost without it.
        super().set_loss_fn(functools.partial(self._loss, loss_fn))

    def _recorder_of(
        self, settings: Recording | None, policy_loss: Any, observed: Region | None = None
    ) -> Recorder | None:
        """Returns the recorder of this rank, or None if nothing is recorded or another rank holds the same tokens."""
        self._silent = None
        if settings is None:
            return None
        if not self.engine.is_mp_src_rank_with_outputs():
            self._silent = settings
            return None
        about = None
        if self.engine.get_data_parallel_rank() == 0:  # with pipeline stages, not rank 0
            about = batch_rows.about(self, policy_loss.get("loss_mode", "vanilla"), observed=observed is not None)
        return Recorder(settings, self._region or observed, rank=self.rank, about=about)

    def _asked(self, config: Any) -> Recording | None:
        """Returns the recording that the environment asks for, or None."""
        rows = config.ppo_mini_batch_size * config.rollout_n / self.engine.get_data_parallel_size()
        return stock_tokens.recording(rows)

    def _recorded(self, loss_fn: Any, policy_loss: Any) -> Any:
        """Returns verl's own loss, with recording if the environment asks for it and the loss is a policy's."""
        self._stock = self._recorder = None
        settings = None if policy_loss is None else self._asked(loss_fn.keywords["config"])
        if settings is None:
            return loss_fn
        observed = stock_tokens.observed_region()
        self._recorder = self._recorder_of(settings, policy_loss, observed)
        if self._recorder is None:
            return loss_fn
        self._stock = batch_rows.StockRecord(self._recorder, observed)
        return functools.partial(self._stock.loss, loss_fn)

    @functools.wraps(TrainingWorker.train_mini_batch)
    def train_mini_batch(self, data: Any) -> Any:
        """Runs one training step: records the anchors that the region needs, then runs verl's own updates.

        Raises:
            MissingDataError: If the sampler did not record data that the region needs.
            NonFiniteError: If the step dropped more tokens than allowed.
        """
        self._num_steps += 1
        if self._silent is not None:  # with another layout it may have recorded
            retire_rank(self._silent.folder, self.rank, from_step=self._num_steps)
            self._silent = None
        if self._recorder is not None:
            name_sequences(self._recorder, data, self, step=self._num_steps)
        if self._region is None:
            return self._train_as_verl(data)
        anchors.check(self._needs, data)
        (self._bypass,) = self._everywhere(anchors.bypassed(data))
        if self._truncated:
            data.update(anchors.kept(data))
        self._own_anchor = False
        if anchors.own_forward(self._needs, bypass=self._bypass, truncated=self._truncated):
            if self._vocabulary is not None:
                self._vocabulary.remember_head()
            data.update(self._record_anchor(data))
        versions, replicas = anchors.versions(data, self._sent), anchors.replicas(data)
        versioned, numbered = self._everywhere(bool(versions), self._replicas.knows(replicas))
        if not numbered:
            self._replicas.agree(replicas, self.engine.get_data_parallel_group())
        data[REPLICA] = self._replicas.numbers(replicas).to(data["response_mask"].device)
        if versioned:  # ranks add up the same sums
            data.update(versions)
        elif reads_ages(self._region):
            raise MissingDataError(
                f"The sampler must record the version of its weights at each token for {self._region.kind} with "
                "max_staleness, got none. Set actor_rollout_ref.rollout.agent.default_agent_loop="
                "trustrl_single_turn_agent (or trustrl_tool_agent), or set region.max_staleness=null."
            )
        if self._vocabulary is not None:
            tu.assign_non_tensor(data, **{anchors.PASS: "train"})
        self._step = StepSums()
        out = super().train_mini_batch(data)
        summed = self._step.total(self.engine.get_data_parallel_group())
        total = None if summed is None else on_host(summed)
        region_metrics = {} if total is None else rates(total)
        if self._recorder is not None and total is not None:
            self._recorder.end_step(self._num_steps, total)
            self._flush_at_the_end()
        if total is not None:
            self._check.check(region_metrics, total)
            region_metrics = (
                chosen(region_metrics, self._metrics)
                | clip_metrics(total)
                | self._replicas.check(total, self._num_steps)
            )
        if out is not None:
            metrics = tu.get(out, "metrics")
            tu.assign_non_tensor(out, metrics={**metrics, **{name: [value] for name, value in region_metrics.items()}})
        return out

    def _record_anchor(self, data: Any) -> dict[str, Tensor]:
        """Returns π' as fields to add to a batch, except for the first update, whose own forward pass it is."""
        distribution = self._vocabulary is not None
        self._own_anchor = self._reuses_first_pass and first_update.applies(self.engine, data)
        if not self._own_anchor:
            return anchors.record(self, data, distribution=distribution)
        ranks, rank = self.engine.get_data_parallel_size(), self.engine.get_data_parallel_rank()
        config = self.engine_config
        multiple = 1 if config.use_dynamic_bsz else config.infer_micro_batch_size_per_gpu or 1
        first = first_update.first_rows(data, ranks=ranks, rank=rank)
        rows = first_update.rows_to_record(data, first, multiple)
        if not len(rows):
            return {}
        fields = anchors.record(self, tu.index_select_tensor_dict(data, rows), distribution=distribution)
        return first_update.spread(fields, rows, data)

    def _train_as_verl(self, data: Any) -> Any:
        """Runs verl's own updates with verl's own loss."""
        if self._stock is None:
            return super().train_mini_batch(data)
        self._stock.begin(self._num_steps, data, self._sent)
        out = super().train_mini_batch(data)
        self._stock.end()
        self._flush_at_the_end()
        return out

    def _flush_at_the_end(self) -> None:
        """Waits for the uploads of the record at the last step. verl then ends its workers without notice."""
        last = getattr(self.optimizer_config, "total_training_steps", None) or -1
        if self._recorder is not None and 0 < last <= self._num_steps:
            self._recorder.flush()

    def weights_sent(self, version: int) -> None:
        """Notes that the sampler now has the current weights, under this version."""
        self._sent[version] = self._num_steps

    @functools.wraps(TrainingWorker.train_batch)
    def train_batch(self, data: Any) -> Any:
        """Runs one update."""
        if self._region is not None:
            self._step.updates += 1
        if self._stock is not None:
            self._stock.begin_update()
        if self._own_anchor and self._vocabulary is not None:
            tu.assign_non_tensor(data, **{anchors.PASS: "first"})
        try:
            return super().train_batch(data)
        finally:
            self._own_anchor = False  # the weights have moved

    @functools.wraps(TrainingWorker.save_checkpoint)
    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> Any:
        """Saves verl's checkpoint, and the region in the same folder. The record reaches the disk before."""
        if self._recorder is not None:
            self._recorder.sync()
        out = super().save_checkpoint(local_path, *args, **kwargs)
        if self._region is not None and self.rank == 0:
            region_settings.write_to_checkpoint(Path(local_path), config_to_dict(self._region))
        return out

    @functools.wraps(TrainingWorker.load_checkpoint)
    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> Any:
        """Loads verl's checkpoint. Rank 0 warns if the region has changed since the checkpoint."""
        before = None
        if local_path and self.rank == 0:  # before loading, because verl may delete the folder afterwards
            before = region_settings.read_from_checkpoint(Path(local_path))
        out = super().load_checkpoint(local_path, *args, **kwargs)
        if local_path and (steps := re.findall(r"global_step_(\d+)", str(local_path))):
            # verl does not tell its workers the step. The folder's name has it.
            self._num_steps = int(steps[-1])
        if self._region is not None and local_path:
            region_settings.warn_if_changed(before, config_to_dict(self._region), Path(local_path).parent.name)
        return out

    def _everywhere(self, *facts: bool) -> list[bool]:
        """Returns whether each fact holds on every rank. A forward pass that only some run would never return."""
        group = self.engine.get_data_parallel_group()
        known = torch.tensor([int(fact) for fact in facts], device=get_device_id())
        torch.distributed.all_reduce(known, op=torch.distributed.ReduceOp.MIN, group=group)
        return [bool(fact) for fact in known.tolist()]

    def _loss(self, theirs: Any, *, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict]:
        """Runs verl's loss of one micro-batch with the region in it."""
        assert self._region is not None
        if self._vocabulary is not None:
            tokens, rollout, policy = self._vocabulary.take()
        else:
            tokens, rollout, policy = every_response_token(data), {}, {}
            if "entropy" in model_output:
                policy["entropy"] = tokens.of(no_padding_2_padding(model_output["entropy"].detach(), data))
        columns = {"token_ids": "responses", "version": anchors.VERSION, "turn": anchors.TURN}
        rollout |= {"sequence_ids": tokens.row, "position": tokens.column, "replica": tokens.of_rows(data[REPLICA])}
        rollout |= {name: taken(data[key], tokens) for name, key in columns.items() if key in data.keys()}  # noqa: SIM118
        if "version" in rollout:
            policy["version"] = self._num_steps
        sequences = data.get(SEQUENCE, None)
        context = LossContext(
            self._region,
            anchors.logps(data, tokens, bypass=self._bypass, truncated=self._truncated),
            functools.partial(self._receive, data["dp_size"], None if sequences is None else tokens.of_rows(sequences)),
            rollout,
            policy,
            self._own_anchor,
            tokens,
        )
        with active(context):
            return theirs(model_output=model_output, data=data, dp_group=dp_group)

    def _receive(
        self,
        ranks: int,
        sequences: Tensor | None,
        out: LossOutput,
        policy: PolicyTokens,
        rollout: RolloutTokens,
        weights: Tensor,
    ) -> None:
        """Adds the sums of one micro-batch, records its tokens, and checks the ratio before the first step."""
        self._step.add(share_of_one_rank(out.sums, weights, ranks))
        if self._step.updates == 1:  # later updates train other weights
            self._step.add(self._replicas.sums(policy, rollout))
        if self._recorder is not None:
            assert sequences is not None
            update = max(self._step.updates - 1, 0)
            self._recorder.add(out, policy, rollout, sequences=sequences, step=self._num_steps, update=update)
        if self._first_loss:  # a resumed asynchronous run may begin with tokens of older weights
            switch = "policy_loss.startup_checks=False"
            self._first_loss = not check_first_loss(policy, rollout, self._needs.anchor, switch=switch)


def _noting_versions(send: Any) -> Any:
    @functools.wraps(send)  # keeps verl's mark of how to call it on a group of workers
    async def update_weights(self: Any, global_steps: int | None = None, mode: str = "auto") -> Any:
        sent = await send(self, global_steps=global_steps, mode=mode)
        if global_steps is not None and isinstance(self.actor, RegionWorker):
            self.actor.weights_sent(global_steps)
        return sent

    return update_weights


def install() -> None:
    """Makes `RegionWorker` the actor of verl's workers, and tells it when weights are sent to the sampler.

    Raises:
        EngineError: If verl calls its workers in a way that this adapter does not support.
        ConfigError: If another package has already replaced the actor.
    """
    # Checked on import, so that an unsupported verl fails at the start and not at its first step.
    seam.require_parameters(TrainingWorker, "set_loss_fn", ("self", "loss_fn"))
    for name in ("train_mini_batch", "train_batch", "infer_batch"):
        seam.require_parameters(TrainingWorker, name, ("self", "data"))
    seam.require_parameters(FSDPEngineWithLMHead, "prepare_model_inputs", ("self", "micro_batch"))
    seam.require_parameters(
        FSDPEngineWithLMHead,
        "prepare_model_outputs",
        ("self", "output", "output_args", "micro_batch", "logits_processor_func"),
    )
    worker_cls = ActorRolloutRefWorker.actor_worker_cls
    if worker_cls is not TrainingWorker and not issubclass(worker_cls, RegionWorker):
        raise ConfigError(
            f"ActorRolloutRefWorker.actor_worker_cls must be verl's own, got {worker_cls!r}, set by another package. "
            f"Derive that class from {RegionWorker.__module__}.RegionWorker."
        )
    if worker_cls is TrainingWorker:
        seam.require_parameters(ActorRolloutRefWorker, "update_weights", ("self", "global_steps", "mode"))
        seam.require_parameters(ActorRolloutRefWorker, "init_model", ("self",))
        ActorRolloutRefWorker.actor_worker_cls = RegionWorker
        ActorRolloutRefWorker.init_model = batch_rows.knowing_the_config(ActorRolloutRefWorker.init_model)
        ActorRolloutRefWorker.update_weights = _noting_versions(ActorRolloutRefWorker.update_weights)

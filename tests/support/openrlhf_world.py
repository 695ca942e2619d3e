"""OpenRLHF's own trainer of the actor around a region: with stubs for the network and DeepSpeed, and with DeepSpeed.

`Run` makes one update as OpenRLHF does, from samples to optimizer step, in one process: its own experience maker, actor,
replay buffer and training loop, and DeepSpeed's engine in float32. Calls that go through Ray are plain calls.
"""

import os
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from openrlhf.models import Actor
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils import config

from support import regions_oracle as oracle
from trustrl.engines.common.kept_columns import column_of
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.openrlhf import launcher
from trustrl.engines.openrlhf.sampled_rows import SAMPLED, SampledRow, is_recorded, topk_of_sampler

WORKING = ["--actor.model_name_or_path", "model", launcher.OPTION, "dppo-binary-tv"]
RECORDED = ["--algo.advantage.is_correction_level", "token"]


class Parsed(Exception):
    """Raised in place of the run, with OpenRLHF's arguments."""


def arguments(*given):
    """OpenRLHF's arguments as its own command reads them, nested."""

    def stop(args):
        raise Parsed(before(args))

    with pytest.MonkeyPatch.context() as patch:
        before = config.hierarchize
        patch.setattr(config, "hierarchize", stop)
        patch.setattr(sys, "argv", ["train_ppo_ray", *map(str, given)])
        with pytest.raises(Parsed) as parsed:
            runpy.run_module(launcher.COMMAND, run_name="__main__")
    (args,) = parsed.value.args
    if args.actor.eps_clip_low_high is None:  # as the command does before it starts Ray
        args.actor.eps_clip_low_high = (args.actor.eps_clip, args.actor.eps_clip)
    return args


class StubActor(torch.nn.Module):
    """A stub of the network: its log-probs are given."""

    def __init__(self, logp):
        super().__init__()
        self.logp = logp

    def forward(self, sequences, action_mask, **options):
        return self.logp * action_mask, None


def stub_strategy(args):
    """A stub of DeepSpeed's engine: plain autograd, and no optimizer."""
    return SimpleNamespace(
        args=args,
        ring_attn_group=None,
        backward=lambda loss, model, optimizer: loss.backward(),
        optimizer_step=lambda *args, **options: None,
        get_grad_norm=lambda model: 0.0,
    )


def trainer(args, logp):
    """The trainer around a stub of the network."""
    return trainer_of(args, StubActor(logp))


def trainer_of(args, actor):
    """The trainer that `ppo_actor` holds now, as `PolicyModelActor` makes it."""
    from openrlhf.trainer.ray import ppo_actor

    scheduler = SimpleNamespace(get_last_lr=lambda: [0.0])
    return ppo_actor.ActorPPOTrainer(
        stub_strategy(args), actor, ema_model=None, actor_optim=None, actor_scheduler=scheduler
    )


def experience(batch, recorded=True):
    """A micro-batch of the parity file as OpenRLHF's experience."""
    mask = batch.in_loss.long()
    return Experience(
        sequences=torch.zeros(len(mask), mask.shape[1] + 1, dtype=torch.long),
        attention_mask=torch.ones(len(mask), mask.shape[1] + 1, dtype=torch.long),
        action_mask=mask,
        action_log_probs=batch.proximal_logp,
        rollout_log_probs=batch.behavior_logp if recorded else None,
        advantages=batch.advantage,
    )


ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
"""DeepSpeed looks for MPI without these, also if the process group exists."""


class Run:
    """One process of OpenRLHF that samples nothing: its samples are those of `regions_oracle.batch`."""

    def __init__(self, folder, case, *given, micro_batch=3):
        from deepspeed.utils import safe_get_full_grad
        from openrlhf.trainer.ppo_utils import experience_maker
        from openrlhf.trainer.ray import ppo_actor
        from openrlhf.utils import get_strategy

        os.environ |= ONE_RANK
        self.batch = oracle.batch(folder, 0, case)
        self.args = args = arguments(
            "--rollout.temperature", oracle.TEMPERATURE, "--train.batch_size", oracle.ROWS, "--train.micro_batch_size",
            micro_batch, "--rollout.micro_batch_size", 3, "--rollout.batch_size", 2 * oracle.ROWS, "--actor.loss_agg_mode",
            case.mode, *given,
        )  # fmt: skip
        args.ds.param_dtype = "fp32"  # by name, OpenRLHF has bf16 and fp16
        self.strategy = strategy = get_strategy(args)
        strategy.setup_distributed()
        actor = Actor(oracle.model_of(folder), temperature=oracle.TEMPERATURE)
        actor.packing_samples = False
        adam = {"optim": "adam", "muon": {}, "adam": vars(args.actor.adam), "lr_scheduler": "constant"}
        schedule = {"lr_warmup_ratio": 0, "min_lr_ratio": 0.1, "max_norm": 1.0, "scheduler_steps": 10}
        self.actor, optimizer, scheduler = strategy.prepare((actor, adam | schedule))
        self.model = self.actor.model.module
        worker = ppo_actor.PolicyModelActor.__ray_metadata__.modified_class
        self.worker = worker.__new__(worker)
        self.worker.actor, self.worker.strategy = self.actor, strategy
        self.trainer = ppo_actor.ActorPPOTrainer(
            strategy, self.actor, ema_model=None, actor_optim=optimizer, actor_scheduler=scheduler,
            micro_train_batch_size=micro_batch, dataloader_pin_memory=False,
        )  # fmt: skip
        self.worker.trainer = self.trainer
        self.maker = experience_maker.RemoteExperienceMaker(
            self, None, None, None, None, strategy, SimpleNamespace(pad_token_id=0)
        )
        self.gradient, self.losses = {}, []
        self.trainer.actor_loss_fn.register_forward_hook(lambda loss, given, found: self.losses.append(found[0].item()))
        step = strategy.optimizer_step

        def watched(optim, model, *more, **options):
            if model.model.is_gradient_accumulation_boundary():
                self.gradient = {name: safe_get_full_grad(p) for name, p in self.model.named_parameters()}
            step(optim, model, *more, **options)

        strategy.optimizer_step = watched

    def async_run_method_batch(self, method_name, **columns):
        """The actor's group: what its one worker returns."""
        calls = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [[getattr(self.worker, method_name)(**call) for call in calls]]

    def async_run_method(self, method_name):
        return []

    def samples(self):
        """The rows of the batch as OpenRLHF's generator makes them: not padded, one entry per token but the first."""
        batch, made = self.batch, []
        for row, length in enumerate(batch.in_sequence.sum(1) + oracle.PROMPT):
            ids = torch.cat([batch.prompts[row], batch.responses[row]])[:length]

            def after_the_prompt(x, length=length, row=row):
                return torch.cat([x.new_zeros(oracle.PROMPT - 1), x[row]])[None, : length - 1]

            made.append(
                Experience(
                    sequences=ids[None], attention_mask=torch.ones_like(ids)[None],
                    action_mask=after_the_prompt(batch.in_loss.long()),
                    rollout_log_probs=after_the_prompt(batch.behavior_logp),
                    base_action_log_probs=after_the_prompt(batch.reference_logp),
                    advantages=after_the_prompt(batch.advantages), mm_train_inputs=[self.sampled(row)], rewards=torch.zeros(1),
                    total_length=length[None].float(), prompts=[""], labels=[""], images=[None],
                )
            )  # fmt: skip
        return made

    def sampled(self, row):
        """What vLLM's actor puts into a response, of the batch's sampler and of weights without an update."""
        region, batch = region_given(os.environ["TRUSTRL_REGION"], ""), self.batch
        if not is_recorded(region, truncated=batch.kept is not None):
            return None
        on = batch.in_loss[row]
        k = topk_of_sampler(region)
        ids, logp = (x[row, on, :k].numpy() for x in (batch.behavior_top_ids.int(), batch.behavior_top_logp))
        kept = None if batch.kept is None else column_of([at.nonzero()[:, 0].numpy() for at in batch.kept[row, on]])
        return {SAMPLED: SampledRow(ids, logp, np.zeros(len(ids), np.int32), kept)}

    def experiences(self):
        """What OpenRLHF's experience maker returns, with the batch's advantages and reference."""
        samples = self.maker.split_rollout_samples(self.samples())
        before = [sample.base_action_log_probs for sample in samples]
        made = self.maker.make_experience(samples)
        for experience, reference in zip(made, before, strict=True):
            experience.base_action_log_probs, experience.kl, experience.index = reference, None, None
        return made

    def update(self, kl=0.0):
        """Records, moves the policy, and trains on it; returns the status that OpenRLHF logs."""
        for experience in self.experiences():
            self.trainer.replay_buffer.append(experience)
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(oracle.GROWTH)
        return self.trainer.ppo_train(kl)

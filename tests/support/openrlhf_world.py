"""OpenRLHF's own trainer of the actor around a region, with a stub for the network and for DeepSpeed."""

import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils import config

from trustrl.engines.openrlhf import launcher

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

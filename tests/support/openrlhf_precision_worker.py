"""OpenRLHF's actor and its trainer in 16 bits: every kind of region, and the policy against itself.

The network is OpenRLHF's own; DeepSpeed is a stub, since it only moves the weights after the pass that is measured.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from openrlhf.models import Actor
from openrlhf.trainer.ppo_utils.experience import Experience

from support import openrlhf_world as world, self_divergence as own
from support.devices import start_process_group
from trustrl.engines import openrlhf as engine
from trustrl.engines.common import sampled_loss
from trustrl.engines.openrlhf import vocabulary
from trustrl.engines.openrlhf.anchor_rows import CARRIED, RecordedLogp, carry
from trustrl.engines.openrlhf.losses import RegionLoss

ROWS = 2
"""Sequences of a micro-batch, in the recording pass and in the update."""


def experience_of(actor, tokens, part):
    """A micro-batch with the log-probs that the actor records, as `PolicyModelActor.forward` does, for both anchors."""
    sequences = torch.cat([tokens.prompts, tokens.responses], 1)[part]
    mask = tokens.in_loss[part].long()
    attention = torch.cat([torch.ones_like(tokens.prompts[part]), mask], 1)
    actor.eval()
    with torch.no_grad():
        recorded = actor(sequences, mask, attention)
    actor.train()
    logp = recorded.logp if isinstance(recorded, RecordedLogp) else recorded
    experience = Experience(
        sequences=sequences, attention_mask=attention, action_mask=mask, action_log_probs=logp,
        rollout_log_probs=logp, advantages=tokens.advantages[part],
    )  # fmt: skip
    if isinstance(recorded, RecordedLogp):  # as the experience maker does
        carry(experience, **{CARRIED: recorded.rows})
    return experience


def measured(folder, precision, kind):
    """The policy against itself in one update, or None if OpenRLHF's adapter refuses the region."""
    region = own.KINDS[kind]
    mode = "seq-mean-token-mean" if kind in own.PER_SEQUENCE else "token-mean"
    if region.needs().full:
        return None
    actor = Actor(folder, attn_implementation="eager", param_dtype=precision, temperature=own.TEMPERATURE)
    assert next(actor.parameters()).element_size() == 2
    args = world.arguments(*world.RECORDED, "--actor.loss_agg_mode", mode)
    trainer = world.trainer_of(args, actor)
    if region.needs().topk:  # as the trainer's constructor does
        calls, trainer.actor_loss_fn = vocabulary, vocabulary.VocabularyLoss(region, mode)
        trainer._vocabulary = vocabulary.VocabularyPass(actor, trainer.actor_loss_fn)
    else:
        calls, trainer.actor_loss_fn = sampled_loss, RegionLoss(region, mode)
    tokens = own.tokens(folder)
    with own.watched(calls) as seen:
        for start in range(0, len(own.LENGTHS), ROWS):
            experience = experience_of(actor, tokens, slice(start, start + ROWS))
            trainer.training_step(experience, kl_ctl=0.0, step=0)
    assert actor.model.lm_head.weight.grad.isfinite().all()
    return own.measured(seen, precision)


def main(folder, out, about, kinds):
    torch.set_num_threads(1)
    start_process_group()
    engine.install()
    os.environ["TRUSTRL_REGION"] = "dppo-binary-tv"  # `measured` puts each kind's loss in its place
    rows = own.cells(partial(measured, folder, about["precision"]), kinds, **about)
    Path(out).write_text(json.dumps(rows))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(json.loads, sys.argv[3:5]))

"""One rank of prime-rl's trainer on a CPU: `train` with the settings of a file, and what its optimizer saw.

    torchrun ... prime_rl_worker.py settings.json out [again]

Writes the gradients that each optimizer step took and the weights that it left. With "again", the batch after the first is
the same batch with the trainer's own log-probs as the sampler's: the policy against itself, in prime-rl's own precision.
"""

import asyncio
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.optim import optimizer as torch_optimizer

from support import prime_rl_on_cpu

AGAIN = "again" in sys.argv[3:]
train = prime_rl_on_cpu.trainer(None if AGAIN else torch.float32)

import numpy as np
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.trainer.world import get_world
from prime_rl.transports.rollouts import setup_micro_batch_receiver, setup_micro_batch_sender
from prime_rl.transports.rollouts.types import RoutedExperts

from support import self_divergence as own
from support.fsdp2_shardings import whole


def saved(path, tensors):
    gathered = {str(at): whole(x).contiguous().clone() for at, x in enumerate(tensors)}  # a collective
    if get_world().is_master:
        save_file(gathered, path)


def differences(seen):
    """The largest differences between the policy and the sampler's record over the tokens of a step."""
    logs = [abs(policy.logp.detach() - rollout.behavior_logp)[rollout.in_loss] for _, policy, rollout in seen]
    tops = [
        abs(policy.topk_logp.detach().exp() - rollout.topk.logp.exp())[rollout.in_loss]
        for _, policy, rollout in seen
    ]  # fmt: skip
    masked = sum(int((~out.decision.keep & rollout.in_loss).sum()) for out, _, rollout in seen)
    return {
        "log_ratio": torch.cat(logs).max().item(), "top": torch.cat(tops).max().item(), "masked": masked,
        "tokens": sum(len(x) for x in logs),
    }  # fmt: skip


def send_again(config, seen):
    """The first batch with the trainer's own log-probs, in the wire format of an orchestrator."""
    rank = get_world().rank
    batch = setup_micro_batch_receiver(config.output_dir, rank, 1, config.rollout_transport).receive()
    rest = iter(seen)
    for micro_batch in batch:
        parts = [next(rest) for _ in micro_batch.sequence_lengths]
        logp = torch.cat([policy.logp[0].detach() for _, policy, _ in parts])
        top = torch.cat([policy.topk_logp[0].detach() for _, policy, _ in parts]).float()
        ids = torch.cat([rollout.topk.ids[0] for *_, rollout in parts]).int()
        table = np.stack([ids.numpy(), top.contiguous().numpy().view(np.int32)], axis=1)
        micro_batch.inference_logprobs = logp.tolist()
        micro_batch.routed_experts = RoutedExperts(table.tobytes(), list(table.shape), str(table.dtype))
    sender = setup_micro_batch_sender(config.output_dir, 1, 2, config.rollout_transport)
    asyncio.run(sender.send([batch]))


def watched():
    """The calls of a Top-K region's loss, where they are wanted: the import of its module replaces the output layer."""
    if not AGAIN:
        return nullcontext([])
    from trustrl.engines.prime_rl import vocabulary

    return own.watched(vocabulary)


def main(settings, out, *_):
    config, out = TrainerConfig.model_validate_json(Path(settings).read_text()), Path(out)
    config.model.attn = "eager"  # its settings know kernels of GPUs only
    steps = []
    with watched() as seen:

        def before(optimizer, *_):
            saved(out / f"gradient_{len(steps)}.safetensors", (p.grad for p in optimizer.param_groups[0]["params"]))

        def after(optimizer, *_):
            saved(out / f"weights_{len(steps)}.safetensors", (p.detach() for p in optimizer.param_groups[0]["params"]))
            steps.append(differences(seen) if AGAIN else {})
            if AGAIN and len(steps) < config.max_steps:
                send_again(config, seen)
            seen.clear()

        torch_optimizer.register_optimizer_step_pre_hook(before)
        torch_optimizer.register_optimizer_step_post_hook(after)
        train.train(config)
    (out / "steps.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])

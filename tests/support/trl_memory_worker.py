"""One measured training step, in a process of its own: `trl_memory_worker.py REGION` prints bytes as JSON.

`all logits` in place of a region measures the step that regions are there to avoid.
"""

import json
import sys
from pathlib import Path

import torch

import trustrl
from support import trl_world as world

V, D, ROWS, PROMPT, COMPLETION = 151_936, 256, 8, 16, 128


def sequences(rows, length):
    g = torch.Generator().manual_seed(0)
    lengths = torch.full((rows, 1), length)
    lengths[0] -= 3
    return {
        "prompt_ids": torch.randint(4, V, (rows, PROMPT), generator=g),
        "prompt_mask": torch.ones(rows, PROMPT, dtype=torch.long),
        "completion_ids": torch.randint(4, V, (rows, length), generator=g),
        "completion_mask": (torch.arange(length) < lengths).long(),
        "advantages": torch.linspace(-1, 1, rows),
        "num_items_in_batch": lengths.sum(),
    }


def step(trainer, rows, length):
    """A rollout's recording pass, and one loss with its gradients."""
    inputs = sequences(rows, length)
    inputs |= trainer._recorder.record(trainer.model, inputs, version=0, rows=rows)
    trainer._compute_loss(trainer.model, inputs).backward()


def step_with_all_logits(trainer, rows, length):
    inputs = sequences(rows, length)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    logits = trainer.model(input_ids=ids, use_cache=False, logits_to_keep=length + 1).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["completion_ids"].flatten()).backward()


def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def main(name):
    torch.set_num_threads(1)
    wide = {"vocab_size": V, "hidden_size": D, "intermediate_size": 2 * D, "max_position_embeddings": 256}
    region = trustrl.preset("dppo-binary-tv" if name == "all logits" else name)
    trainer = world.ours(
        region, world.tiny_model(**wide, initializer_range=0.02), per_device_train_batch_size=ROWS,
        num_generations=ROWS, max_completion_length=COMPLETION,
    )  # fmt: skip
    trainer.model.train()
    measured = step_with_all_logits if name == "all logits" else step
    for rows, length in ((2, 8), (3, 32)):  # loads and compiles, for one shape and then for any
        measured(trainer, rows, length)
    trainer.model.zero_grad(set_to_none=True)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident("VmRSS")
    measured(trainer, ROWS, COMPLETION)
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in trainer.model.parameters())
    print(json.dumps({"peak": resident("VmHWM") - before, "gradients": gradients}))


if __name__ == "__main__":
    main(*sys.argv[1:])

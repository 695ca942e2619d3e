"""Memory of a TRL step at even and uneven lengths: `python -m support.trl_uneven 8192` prints a table."""

import sys

import torch

from support import trl_world as world, uneven

PROMPT = 4


def sequences(lengths):
    make, longest = torch.Generator().manual_seed(0), int(lengths.max())
    mask = (torch.arange(longest) < lengths.unsqueeze(1)).long()
    return {
        "prompt_ids": torch.randint(4, uneven.VOCABULARY, (len(lengths), PROMPT), generator=make),
        "prompt_mask": torch.ones(len(lengths), PROMPT, dtype=torch.long),
        "completion_ids": torch.randint(4, uneven.VOCABULARY, mask.shape, generator=make) * mask,
        "completion_mask": mask,
        "advantages": torch.linspace(-1, 1, len(lengths)),
        "num_items_in_batch": lengths.sum(),
    }


def step_of(region):
    """A rollout's recording pass and one loss with its gradients, as a function of the lengths."""
    rows = {"per_device_train_batch_size": uneven.SEQUENCES, "num_generations": uneven.SEQUENCES, "num_iterations": 2}
    trainer = world.ours(region, world.tiny_model(**uneven.NO_LAYERS), **rows)
    trainer.model.train()

    def step(lengths):
        trainer.model.zero_grad()
        inputs = sequences(lengths)
        inputs |= trainer._recorder.record(trainer.model, inputs, version=0, rows=len(lengths))
        trainer._compute_loss(trainer.model, inputs).backward()

    return step


if __name__ == "__main__":
    uneven.report(uneven.peaks(int(sys.argv[1]), step_of))

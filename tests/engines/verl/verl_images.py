"""One rank of a real verl training worker on a vision-language model: every kind of region, its gradient to a file."""

import functools
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl_regions import training_worker, whole_gradient

from support import regions_oracle as oracle, tiny_vision as tiny
from support.verl_step import gradient_of


def as_verl_carries(batch, positions, **meta):
    """Nested tensors, and a dictionary of images for each row."""
    rows = batch.prompts

    def nested(parts):
        return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)

    offsets = torch.tensor([0, *(len(row.ids) for row in rows)]).cumsum(0)
    data = {
        "prompts": nested(row.prompt for row in rows),
        "input_ids": nested(row.ids for row in rows),
        "position_ids": torch.nested.nested_tensor_from_jagged(torch.cat(positions, 1), offsets, jagged_dim=2),
        "responses": nested(row.response for row in rows),
        "response_mask": nested(torch.ones_like(row.response) for row in rows),
        "loss_mask": nested(torch.ones_like(row.response) for row in rows),
        "advantages": nested(x.repeat(len(row.response)) for x, row in zip(tiny.ADVANTAGES, rows, strict=True)),
        "rollout_log_probs": nested(torch.zeros(len(row.response)) for row in rows),
        "old_log_probs": nested(
            x[: len(row.response)] for x, row in zip(batch.proximal_logp, rows, strict=True)
        ),
        "multi_modal_inputs": [row.passed() for row in rows],
    }  # fmt: skip
    usual = {"temperature": oracle.TEMPERATURE, "calculate_entropy": False}
    return tu.get_tensordict(data, non_tensor_dict=usual | meta)


def main(folder, recorded, out):
    dist.init_process_group("gloo")
    saved = torch.load(recorded)
    worker = training_worker(folder)
    rows = tiny.rows()
    in_sequence = torch.stack([torch.arange(tiny.LONGEST) < len(row.response) for row in rows])
    batch = SimpleNamespace(prompts=rows, proximal_logp=saved["proximal_logp"], in_sequence=in_sequence, kept=None)
    carried = functools.partial(as_verl_carries, positions=saved["positions"])
    found = {
        name: gradient_of(worker, region, batch, "token-mean", gradient=whole_gradient, carried=carried)
        for name, region in tiny.REGIONS.items()
    }
    if int(os.environ["RANK"]) == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

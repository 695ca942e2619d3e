"""A training worker on batches that verl filled up with its own synthetic samples, and on the same without them."""

import os
import sys

import torch
import torch.distributed as dist
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
from verl.utils import tensordict_utils as tu
from verl_regions import training_worker, whole_gradient

from support import regions_oracle as oracle
from support.verl_step import as_verl_carries, gradient_of

COMPUTED = {"advantages": 1.0, "old_log_probs": -1.0, "ref_log_prob": -2.0}
"""Fields that verl's trainer computes after it has padded, with a value that would be seen if it counted."""


def with_padding(batch, **meta):
    """Padding beside real sequences, and a micro-batch of padding alone; micro-batches have two sequences."""
    real = as_verl_carries(batch, **meta)
    tensors = {key: x.unbind() for key, x in real.items() if isinstance(x, torch.Tensor)}
    rows = [{key: x[row] for key, x in tensors.items()} for row in range(len(real))]
    source = {key: x for key, x in rows[0].items() if key not in COMPUTED}
    padding, _ = construct_minimal_padding_template(source, {}, 2)
    padding |= {key: torch.full((1,), value) for key, value in COMPUTED.items()}
    if meta.pop("bypass", False):
        padding["old_log_probs"] = padding["rollout_log_probs"]
    assert len(padding["teacher_ids"]) > len(padding["responses"]) == 1
    rows = [rows[0], padding, *rows[1:], *[padding] * 5]
    nested = {key: torch.nested.as_nested_tensor([row[key] for row in rows], layout=torch.jagged) for key in tensors}
    usual = {"temperature": oracle.TEMPERATURE, "calculate_entropy": False}
    return tu.get_tensordict(nested, non_tensor_dict=usual | meta | {"mini_batch_size": len(rows)})


def main(folder, out):
    dist.init_process_group("gloo")
    worker = training_worker(folder)
    batch, found = oracle.batch(folder, int(os.environ["RANK"])), {}
    for name, case in oracle.CASES.items():
        found[name] = {
            how: gradient_of(
                worker, case.region, batch, case.mode, gradient=whole_gradient, carried=carried, **case.settings
            )
            for how, carried in (("plain", as_verl_carries), ("padded", with_padding))
        }
    torch.save(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

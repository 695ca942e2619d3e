"""What tensor-parallel ranks send while a Top-K region reads the vocabulary: `verl_megatron_bytes.py` prints JSON."""

import json

import torch.distributed as dist
import verl_megatron as megatron

from support import regions_oracle as oracle
from support.verl_step import gradient_of
from support.vocab_ranks import Payloads
from trustrl.engines.verl import megatron_pass

sent = []


def counting(read):
    """Wraps the pass: all collectives inside it, and the number of its rows."""

    def read_vocabulary(states, *args, **kwargs):
        with Payloads() as payloads:
            out = read(states, *args, **kwargs)
        sent.append({"rows": len(states), "collectives": payloads.sizes})
        return out

    return read_vocabulary


def main():
    dist.init_process_group("gloo")
    how = megatron.DEFAULTS | {"tp": 2}
    folder = megatron.model_folder(how)
    worker = megatron.training_worker(folder, how)
    megatron_pass.read_vocabulary = counting(megatron_pass.read_vocabulary)
    case = oracle.CASES["top-K on μ"]
    gradient_of(worker, case.region, oracle.batch(folder, 0), case.mode, gradient=megatron.main_gradients)
    if dist.get_rank() == 0:
        print(json.dumps(sent))


if __name__ == "__main__":
    main()

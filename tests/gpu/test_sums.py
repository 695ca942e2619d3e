"""Sums of a step over ranks, by NCCL between GPUs and by gloo between processes: those of one rank with all tokens."""

import torch.multiprocessing as mp

from support.devices import need_ranks
from support.sum_ranks import agree


def test_ranks_add_up_to_the_step(tmp_path):
    need_ranks(2)
    mp.start_processes(agree, args=(2, str(tmp_path)), nprocs=2, start_method="spawn")

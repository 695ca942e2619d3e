"""A head sharded over 2 and 4 real processes (gloo, or NCCL on GPUs): the same results as the whole head, and no logits on the wire."""

import multiprocessing

import pytest
import torch.multiprocessing as mp

from support import vocab_ranks as work
from support.devices import need_ranks


def on_ranks(check, ranks, folder):
    """Runs a check in processes that are forked from one which has torch imported, and has used none of it."""
    need_ranks(ranks)
    multiprocessing.get_context("forkserver").set_forkserver_preload([
        "torch", "torch.distributed.tensor.debug", "trustrl.core.token_logprobs",
    ])  # fmt: skip
    mp.start_processes(check, args=(ranks, str(folder)), nprocs=ranks, start_method="forkserver")


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sharded_head_gives_what_the_whole_head_gives(ranks, tmp_path):
    on_ranks(work.agree, ranks, tmp_path)


@pytest.mark.parametrize("ranks", [2, 4])
def test_kept_ids_of_a_sharded_head_have_the_whole_heads_log_probs(ranks, tmp_path):
    on_ranks(work.kept_agree, ranks, tmp_path)


def test_no_collective_carries_logits(tmp_path):
    on_ranks(work.count, 2, tmp_path)


def test_gathering_the_logits_would_be_seen(tmp_path):
    """The control: the plain way sends the rank's part of the logits, and the same counter sees it."""
    on_ranks(work.control, 2, tmp_path)

"""A head sharded over 2 and 4 real processes (gloo): the same results as the whole head, and no logits on the wire."""

import pytest
import ranks as work
import torch.multiprocessing as mp


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sharded_head_gives_what_the_whole_head_gives(ranks, tmp_path):
    mp.spawn(work.agree, args=(ranks, str(tmp_path)), nprocs=ranks)


def test_no_collective_carries_logits(tmp_path):
    mp.spawn(work.count, args=(2, str(tmp_path)), nprocs=2)


def test_gathering_the_logits_would_be_seen(tmp_path):
    """The control: the plain way sends the rank's part of the logits, and the same counter sees it."""
    mp.spawn(work.control, args=(2, str(tmp_path)), nprocs=2)

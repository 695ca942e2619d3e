"""The device of tests that also run on GPUs: `tests/gpu/run.py` sets TRUSTRL_TEST_DEVICE=cuda there."""

import os

import pytest
import torch

ON_GPU = os.environ.get("TRUSTRL_TEST_DEVICE") == "cuda"
DEVICE = "cuda" if ON_GPU else "cpu"
BACKEND = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"


def need_ranks(ranks):
    """Skips a test whose ranks need more GPUs than this machine has."""
    if ON_GPU and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, got {torch.cuda.device_count()}")


def take(rank):
    """Gives this process the GPU of its rank."""
    if ON_GPU:
        torch.cuda.set_device(rank)


def start_process_group():
    """Joins the ranks that torchrun started: NCCL between GPUs, gloo between processes on a CPU."""
    take(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(BACKEND)

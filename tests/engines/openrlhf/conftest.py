"""One rank of gloo, which OpenRLHF's trainer asks for."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()

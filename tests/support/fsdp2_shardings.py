"""Models sharded by FSDP2, with the output layer in each kind of group, and as accelerate shards them."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from support.devices import DEVICE

SHARDINGS = ("head in the root", "norm and head", "head alone")
"""Which group of `fully_shard` holds the output layer; accelerate makes the second."""

RESHARDED = "norm and head, resharded after the forward pass"


def shard(model, sharding, ranks):
    mesh = init_device_mesh(DEVICE, (ranks,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    if sharding in ("norm and head", RESHARDED):
        fully_shard(model.model.embed_tokens, mesh=mesh)
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=sharding == RESHARDED)
    elif sharding == "head alone":
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)


def as_accelerate_shards(model, precision):
    """The model as accelerate's own function shards it. On a CPU, accelerate itself would run DDP instead."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"], reshard_after_forward=True,
    )  # fmt: skip
    plugin.set_mixed_precision(precision)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device(DEVICE), is_main_process=dist.get_rank() == 0,
        mixed_precision=precision, torch_device_mesh=init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("fsdp",)),
        parallelism_config=SimpleNamespace(fsdp_dim_names=("fsdp",)),
    )  # fmt: skip
    model = fsdp2_prepare_model(accelerator, model)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model


@torch.no_grad()
def move(model, width=0.01):
    """The same step away from the rollout weights on every rank, however they are sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    g = torch.Generator().manual_seed(1)
    for p in model.parameters():
        step = width * torch.randn(p.shape, generator=g).to(p.device)
        p.add_(distribute_tensor(step, p.device_mesh, p.placements) if isinstance(p, DTensor) else step)


def whole(gradient):
    """A gradient that is no DTensor."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

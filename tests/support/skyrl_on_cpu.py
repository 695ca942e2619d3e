"""What SkyRL's FSDP workers take from a GPU, replaced: device, meshes, NCCL, and two functions of flash-attention."""

import functools
import importlib.machinery
import sys
import types

import torch
import transformers.modeling_utils  # noqa: F401  it asks for flash-attention, and keeps the answer
from torch import Tensor


def unpad_input(x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
    """(P, ...) of (B, L, ...): the attended tokens of all rows, and their places."""
    places = attention_mask.flatten().nonzero().flatten()
    return x.flatten(0, 1)[places], places, None, None, None


def pad_input(x: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    return x.new_zeros(batch * seqlen, *x.shape[1:]).index_copy(0, indices, x).view(batch, seqlen, *x.shape[1:])


def install() -> None:
    """Call it before SkyRL's workers are imported, once in each process."""
    if "flash_attn" in sys.modules:
        return
    for name in ("flash_attn", "flash_attn.bert_padding"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    padding = sys.modules["flash_attn.bert_padding"]
    padding.pad_input, padding.unpad_input = pad_input, unpad_input

    torch.cuda.current_device = lambda: "cpu"
    for name in ("set_device", "empty_cache", "synchronize"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    Tensor.cuda = lambda self, *args, **kwargs: self
    empty = torch.empty

    @functools.wraps(empty)
    def empty_on_cpu(*args, device=None, **kwargs):
        return empty(*args, device="cpu" if device == "cuda" else device, **kwargs)

    torch.empty = empty_on_cpu

    group, mesh = torch.distributed.init_process_group, torch.distributed.device_mesh.init_device_mesh
    torch.distributed.init_process_group = lambda backend=None, **kwargs: group("gloo", **kwargs)

    @functools.wraps(mesh)
    def on_cpu(device_type, *args, **kwargs):
        return mesh("cpu", *args, **kwargs)

    torch.distributed.device_mesh.init_device_mesh = on_cpu
    torch.distributed.init_device_mesh = on_cpu

"""VeOmni on a CPU, for tests: float32 throughout unless asked otherwise, and two kernels in plain torch where VeOmni's need a GPU.

VeOmni names both places for other kernels. Its exchange of tokens and heads between ranks is unchanged.
"""

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention, silu
from veomni.ops.kernel_registry import KERNEL_REGISTRY, HardwareRequirement, KernelSpec
from veomni.ops.kernels import moe
from veomni.ops.kernels.attention import flash
from verl.workers.engine.veomni import transformer_impl as engine

ATTENTION, EXPERTS = "flash_attention_2", "fused_cpu"
"""The settings `attn_implementation` and `moe_implementation` that choose these kernels."""

TRITON = "veomni.ops.kernels.moe._kernels.kernel.group_gemm"


def install(param_dtype: str = "float32") -> None:
    # verl's settings choose between 16 bits and a mixture; errors below 1e-5 need 32.
    engine.MixedPrecisionConfig = partial(engine.MixedPrecisionConfig, param_dtype=param_dtype)
    engine.VeOmniEngineWithLMHead._autocast_dtype = getattr(torch, param_dtype)
    flash._flash_attention_forward = _attention
    found = SimpleNamespace(
        flash_attn_func=_attention, flash_attn_varlen_func=_attention
    )  # transformers looks for them
    flash._load_veomni_local_flash_kernel = lambda _: found
    sys.modules[TRITON] = _without_triton()
    KERNEL_REGISTRY.register(
        KernelSpec(
            name=EXPERTS.removeprefix("fused_"), op_name="moe_experts", variant="standard",
            factory=lambda: moe._make_moe_experts_adapter(_experts), hardware=HardwareRequirement(device_type="any"),
        )
    )  # fmt: skip
    moe.apply_veomni_fused_moe_patch = lambda fused_moe_kernel: None  # would refuse a name that is not VeOmni's


def _attention(query, key, value, attention_mask, *, softmax_scale, cu_seq_lens_q, **_):
    """(1, T, H, D): causal within each sequence."""
    assert attention_mask is None
    bounds = cu_seq_lens_q[1:-1].tolist()
    parts = zip(*(x.transpose(1, 2).tensor_split(bounds, 2) for x in (query, key, value)), strict=True)
    attended = [
        scaled_dot_product_attention(*part, is_causal=True, scale=softmax_scale, enable_gqa=True) for part in parts
    ]
    return torch.cat(attended, 2).transpose(1, 2)


def _without_triton():
    module = ModuleType(TRITON)
    module.group_gemm_same_mn = module.group_gemm_same_nk = None
    return module


class _Loop:
    """This rank's experts, one after another; `apply` has the arguments of VeOmni's `EPMergedFc1GroupGemm`."""

    @staticmethod
    def apply(tokens, ends, gate_up_weights, down_weights, _limit):
        groups = tokens.tensor_split(ends[:-1].tolist())
        outputs = []
        for x, gate_up, down in zip(groups, gate_up_weights, down_weights, strict=True):
            gate, up = (x @ gate_up.T).chunk(2, -1)
            outputs.append((silu(gate) * up) @ down.T)
        return torch.cat(outputs)


def _experts(
    *, num_experts, routing_weights, selected_experts, hidden_states, fc1_1_2_weight, fc2_weight, swiglu_limit, **_
):
    from veomni.distributed.moe import moe_layer

    def all_gather_into_tensor(out, x, group):
        return dist.all_gather_into_tensor(out.view(-1), x, group=group)  # gloo compares shapes, NCCL does not

    moe_layer.dist = SimpleNamespace(**vars(dist) | {"all_gather_into_tensor": all_gather_into_tensor})
    return moe_layer.dispatch_to_ep_class(
        _Loop, num_experts, routing_weights, selected_experts, hidden_states, fc1_1_2_weight, fc2_weight, swiglu_limit
    )

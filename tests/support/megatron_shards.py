"""A rank's part of a whole model's weights or gradients, by Megatron's names.

Written from the two libraries' shapes alone: it shares no code with what loads the weights. Megatron's local layers are
tested on CPUs. Transformer-engine's, which fuse norms into the next layer and group experts, need a GPU.
"""

import torch
from megatron.core import parallel_state as parallel

DIRECT = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    # Transformer-engine's
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
"""Weights of a layer that every rank holds whole."""


def bare(module):
    """The model inside DDP and precision wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def parameters(engine):
    """Every parameter of this rank, as (virtual stage, name, parameter)."""
    return [(stage, name, p) for stage, part in enumerate(engine.module) for name, p in bare(part).named_parameters()]


def of_rank(engine, whole):
    """What each of this rank's parameters is in `whole`, a dictionary with transformers' names."""
    return {(stage, name): _part(bare(engine.module[stage]), name, whole) for stage, name, _ in parameters(engine)}


def _split(x, dim):
    ranks = parallel.get_tensor_model_parallel_world_size()
    return x.chunk(ranks, dim)[parallel.get_tensor_model_parallel_rank()]


def _part(model, name, whole):
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        x = whole["model.embed_tokens.weight" if name.startswith("embedding") else "lm_head.weight"]
        return _split(torch.cat([x, x.new_zeros(model.vocab_size - len(x), x.shape[1])]), 0)  # Megatron's padding
    if name == "decoder.final_layernorm.weight":
        return whole["model.norm.weight"]
    _, _, place, rest = name.split(".", 3)
    layer = f"model.layers.{model.decoder.layers[int(place)].layer_number - 1}."
    if rest in DIRECT:
        return whole[layer + DIRECT[rest]]
    if rest == "self_attention.linear_proj.weight":
        return _split(whole[f"{layer}self_attn.o_proj.weight"], 1)
    if rest == "self_attention.linear_qkv.weight":
        config = model.config
        parts = [whole[f"{layer}self_attn.{kind}_proj.weight"] for kind in "qkv"]
        grouped = [x.reshape(config.num_query_groups, -1, config.kv_channels, x.shape[-1]) for x in parts]
        return _split(torch.cat(grouped, 1).reshape(-1, parts[0].shape[-1]), 0)
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([_split(whole[f"{layer}mlp.{kind}_proj.weight"], 0) for kind in ("gate", "up")])
    if rest == "mlp.linear_fc2.weight":
        return _split(whole[f"{layer}mlp.down_proj.weight"], 1)
    return _expert(model.config, layer, rest, whole)


def _expert(config, layer, rest, whole):
    *_, number, kind, last = rest.split(".")  # mlp.experts.local_experts.0.linear_fc1.weight
    if last != "weight":  # mlp.experts.linear_fc1.weight0, transformer-engine's
        number = last.removeprefix("weight")
    count = config.num_moe_experts // parallel.get_expert_model_parallel_world_size()
    expert = int(number) + count * parallel.get_expert_model_parallel_rank()
    ranks, rank = parallel.get_expert_tensor_parallel_world_size(), parallel.get_expert_tensor_parallel_rank()
    if kind == "linear_fc2":
        return whole[f"{layer}mlp.experts.down_proj"][expert].chunk(ranks, 1)[rank]
    halves = whole[f"{layer}mlp.experts.gate_up_proj"][expert].chunk(2)
    return torch.cat([x.chunk(ranks)[rank] for x in halves])

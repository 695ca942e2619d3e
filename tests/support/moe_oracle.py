"""A tiny mixture of experts for `regions_oracle`, and routes that no router would choose."""

import torch

from support import regions_oracle as oracle

EXPERTS, CHOSEN, LAYERS = 4, 2, 2


def tiny_model(folder):
    """Random weights, and the tokenizer of the dense model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    oracle.tiny_model(folder)
    config = Qwen3MoeConfig(
        vocab_size=oracle.VOCABULARY, hidden_size=oracle.HIDDEN, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=64,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    oracle.fill(model)
    model.save_pretrained(folder)
    return str(folder)


def random_routes():
    """(B, T, layers, 2): only a replay can follow them."""
    make = torch.Generator().manual_seed(5)
    scores = torch.rand(oracle.ROWS, oracle.PROMPT + oracle.RESPONSE, LAYERS, EXPERTS, generator=make)
    return scores.topk(CHOSEN, -1).indices


def follow(routes):
    """Makes the oracle's models take these routes."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    native = oracle.model_of

    def forward(self, hidden):
        logits = torch.nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        routes = self.routes.repeat(len(logits) // len(self.routes), 1)  # every replica's sequences take the same
        scores = logits.softmax(-1).gather(-1, routes)
        return logits, scores / scores.sum(-1, keepdim=True), routes

    def model_of(*args, **kwargs):
        model = native(*args, **kwargs)
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.routes = routes[:, :, number].flatten(0, 1)
        return model

    Qwen3MoeTopKRouter.forward, oracle.model_of = forward, model_of

"""Models of 100,000 parameters with a tokenizer of characters, saved where vLLM can find them; and what they say."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 500  # no multiple of 64: vLLM pads embedding and head
LONGEST = 256


def save_model(path, *, tied, experts=0, seed=0, **shape):
    """A Qwen3 with head_dim 32 and weights large enough that its distributions are far from uniform.

    With `experts`, every layer is a mixture of them and a token goes to two. `shape` is settings that differ.
    """
    torch.manual_seed(seed)
    make, kind = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if experts else (Qwen3Config, Qwen3ForCausalLM)
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    usual = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": LONGEST,
        "tie_word_embeddings": tied, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 1,
        "pad_token_id": 0, **(mixture if experts else {}),
    }  # fmt: skip
    config = make(**usual | shape)
    kind(config).save_pretrained(path)
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(path)
    return tokenizer


def character_tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


@torch.no_grad()
def full_logps(model, sequence):
    """(len − 1, V): transformers' log-probs of what follows each token but the last."""
    return torch.log_softmax(model(input_ids=torch.tensor([sequence])).logits[0, :-1].float(), -1)


def logps(model, sequence):
    """(len − 1,): the same at the tokens that do follow."""
    return full_logps(model, sequence).gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0]


@torch.no_grad()
def perturb(model, size=0.05, only=None):
    """Moves all weights, or one by name."""
    for name, weight in model.named_parameters():
        if only in (None, name):
            weight.add_(size * torch.randn_like(weight))


def some_sequences(*lengths, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=draw).tolist() for length in lengths]

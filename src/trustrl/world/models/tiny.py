"""Character-level language model with a few layers, small enough to train on one CPU core."""

import string
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trustrl.config import validators
from trustrl.errors import ConfigError
from trustrl.optional_imports import need

PAD, BOS, EOS, UNK, START = "<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>"
HEAD_DIM = 32  # the smallest that vLLM's attention supports
SPECIAL = (PAD, BOS, EOS, UNK, START)
CHARACTERS = (*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n")
# ChatML with one end token for turns and texts, so that all samplers stop at the same id.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<eos>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """Shape of a tiny language model, about 0.7 million parameters by default."""

    family: Literal["qwen3", "llama"] = "qwen3"
    """Architecture. Qwen3 normalizes queries and keys, Llama does not."""

    vocab_size: int = 512
    """Ids beyond the characters are unused. They make the vocabulary as large as an experiment needs."""

    tied: bool = False
    """True if the head shares the embedding's weights. Some samplers copy a tied head that updates then miss."""

    num_layers: int = 4

    hidden_size: int = 128
    """A multiple of 64: two heads of size 32 share their keys."""

    seed: int = 0
    """Seed of the initial weights."""

    def __post_init__(self) -> None:
        validators.one_of("tiny.family", self.family, ("qwen3", "llama"))
        validators.whole("tiny.num_layers", self.num_layers, low=1)
        validators.whole("tiny.seed", self.seed, low=0)
        smallest = len(SPECIAL) + len(CHARACTERS)
        validators.whole("tiny.vocab_size", self.vocab_size, low=smallest, advice="Every character needs an id.")
        validators.whole("tiny.hidden_size", self.hidden_size, low=2 * HEAD_DIM)
        if self.hidden_size % (2 * HEAD_DIM):
            raise ConfigError(
                f"tiny.hidden_size must be a multiple of {2 * HEAD_DIM}, got {self.hidden_size}. "
                f"Heads have size {HEAD_DIM}, and two of them share their keys."
            )


def tokenizer(vocab_size: int = Tiny.vocab_size) -> Any:
    """Returns a tokenizer with one token per character, left padding, a chat template, and `<unk>` for the rest."""
    tokenizers = need("tokenizers", extra="models")
    known = [*SPECIAL, *CHARACTERS]
    # Every id has a text, so that any sampled token can be decoded.
    words = known + [f"<unused_{i}>" for i in range(len(known), vocab_size)]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    return loadable(core)


def loadable(core: Any) -> Any:
    """Returns a tokenizer of the library `tokenizers` as transformers loads it, with `SPECIAL` and a chat template."""
    core.add_special_tokens(list(SPECIAL))
    made = need("transformers", extra="models").PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.chat_template = CHAT_TEMPLATE
    return made


def model(settings: Tiny) -> Any:
    """Returns a network with random weights that the settings determine. Leaves torch's random state unchanged."""
    transformers = need("transformers", extra="models")
    heads = settings.hidden_size // HEAD_DIM
    shape, network = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[settings.family]
    config = shape(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        tie_word_embeddings=settings.tied,
        # The usual 0.02 suits wide layers. With it, a tied model of this width cannot add after 2,000 steps.
        initializer_range=0.05,
        pad_token_id=SPECIAL.index(PAD),
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(EOS),
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        return network(config)

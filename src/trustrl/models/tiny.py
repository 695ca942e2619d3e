"""A language model small enough to train on one CPU core: characters in, a few layers, characters out."""

import string
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trustrl.config import checks
from trustrl.errors import ConfigError
from trustrl.packages import need

PAD, BOS, EOS, UNK, START = "<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>"
HEAD_DIM = 32  # the smallest that vLLM's attention takes
SPECIAL = (PAD, BOS, EOS, UNK, START)
CHARACTERS = (*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n")
# ChatML with one end token for turns and texts, so that every sampler stops at the same id.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<eos>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """The shape of a tiny language model, about 0.7 million parameters as it stands."""

    family: Literal["qwen3", "llama"] = "qwen3"
    """Whose blocks: Qwen3 normalises queries and keys, Llama does not."""

    vocab_size: int = 512
    """Ids after the characters stand for nothing and exist to make the vocabulary as large as an experiment needs."""

    tied: bool = False
    """Whether the head is the embedding. Some samplers keep a copy of a tied head that weight updates do not reach."""

    num_layers: int = 4

    hidden_size: int = 128
    """A multiple of 64: two heads of size 32 share their keys."""

    seed: int = 0
    """Of the initial weights."""

    def __post_init__(self) -> None:
        checks.one_of("tiny.family", self.family, ("qwen3", "llama"))
        checks.whole("tiny.num_layers", self.num_layers, low=1)
        checks.whole("tiny.seed", self.seed, low=0)
        smallest = len(SPECIAL) + len(CHARACTERS)
        checks.whole("tiny.vocab_size", self.vocab_size, low=smallest, advice="Every character needs an id.")
        checks.whole("tiny.hidden_size", self.hidden_size, low=2 * HEAD_DIM)
        if self.hidden_size % (2 * HEAD_DIM):
            raise ConfigError(
                f"tiny.hidden_size must be a multiple of {2 * HEAD_DIM}, got {self.hidden_size}. "
                f"Heads have size {HEAD_DIM}, and two of them share their keys."
            )


def tokenizer(vocab_size: int = Tiny.vocab_size) -> Any:
    """One token per character, padded on the left, with a chat template; what it does not know is `<unk>`."""
    transformers, tokenizers = need("transformers", extra="models"), need("tokenizers", extra="models")
    known = [*SPECIAL, *CHARACTERS]
    # Every id has a text, so that anything a model samples can be decoded and looked at.
    words = known + [f"<unused_{i}>" for i in range(len(known), vocab_size)]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    core.add_special_tokens(list(SPECIAL))
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def model(settings: Tiny) -> Any:
    """A network with random weights that follow from the settings; torch's own random stream is left as it was."""
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
        # The usual 0.02 is meant for wide layers: with it, a tied model of this width cannot add after 2,000 steps.
        initializer_range=0.05,
        pad_token_id=SPECIAL.index(PAD),
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(EOS),
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        return network(config)

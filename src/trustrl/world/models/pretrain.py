"""Pre-training of a tiny model on noisy sums, so that reinforcement learning has something to improve.

Each digit of a training answer is replaced by another digit with probability `corrupted`. The trained model therefore
samples a correct answer of n digits with probability (1 − corrupted)ⁿ, about 0.3 with the default settings. With a
separate share for each digit, some tokens are almost certain and others are open, as in a language model.
"""

import hashlib
import json
import math
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trustrl.config import validators
from trustrl.errors import ConfigError
from trustrl.optional_imports import need
from trustrl.world import cache
from trustrl.world.models import tiny
from trustrl.world.models.accuracy import greedy_accuracy, sampled_accuracy
from trustrl.world.models.tiny import Tiny
from trustrl.world.progress import ProgressDisplay
from trustrl.world.tasks import Arithmetic

__all__ = ["Pretraining", "greedy_accuracy", "pretrained", "sampled_accuracy", "trained"]

FORMAT = 1  # incremented when the same settings would give other weights
WARMUP = 50
ANSWERS = 1000  # number of answers behind the accuracies in trustrl.json


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """Settings of a pre-training run. They determine the weights."""

    model: Tiny = field(default_factory=Tiny)

    task: Arithmetic = field(default_factory=Arithmetic)

    corrupted: float | tuple[float, ...] = 0.33
    """Share of answer digits that are replaced by another digit. Several shares apply to the digits in turn,
    cyclically."""

    steps: int = 2400

    batch_size: int = 32

    learning_rate: float = 1.5e-3
    """Peak learning rate: linear warm-up for 50 steps, then cosine decay to 0."""

    seed: int = 0
    """Seed of the order of the problems and of the corrupted digits."""

    def __post_init__(self) -> None:
        for name, kind in (("model", Tiny), ("task", Arithmetic)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(
                    f"pretraining.{name} must be a {kind.__name__}, got {getattr(self, name)!r}. "
                    f"Create one, for example {kind.__module__}.{kind.__name__}()."
                )
        validators.real("pretraining.learning_rate", self.learning_rate, rule="a number > 0", low=0.0)
        for name, low in (("steps", 1), ("batch_size", 1), ("seed", 0)):
            validators.whole(f"pretraining.{name}", getattr(self, name), low=low)
        shares = self.corrupted if isinstance(self.corrupted, tuple) else (self.corrupted,)
        if not shares or not all(0 <= share < 1 for share in shares):
            raise ConfigError(
                f"pretraining.corrupted must be a share in [0, 1) or several of them, got {self.corrupted!r}. "
                "The model then samples a correct answer of n digits with probability (1 − corrupted)ⁿ."
            )

    @property
    def key(self) -> str:
        """Short hash of all settings."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def pretrained(settings: Pretraining) -> Path:
    """Returns a directory with the trained model and its tokenizer, for `from_pretrained` and samplers. Trains once.

    `trustrl.json` in that directory contains the settings, the package versions, and the accuracies.
    """
    return cache.folder(f"tiny-{settings.key}", lambda folder: _save(settings, folder))


def trained(settings: Pretraining) -> tuple[Any, Any]:
    """Trains the model now and returns it with its tokenizer.

    Uses one thread and a separate random generator: on one machine, the same settings give bit-identical weights.
    """
    model, tokenizer = tiny.model(settings.model), tiny.tokenizer(settings.model.vocab_size)
    batches = _batches(settings, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, betas=(0.9, 0.98), fused=True)
    model.train()
    with _one_thread(), ProgressDisplay("pre-training a tiny model", settings.steps) as progress:
        for step in range(settings.steps):
            warm_up = min(1.0, (step + 1) / WARMUP)
            schedule = warm_up * (1 + math.cos(math.pi * step / settings.steps)) / 2
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * schedule
            ids, prompt = next(batches)
            hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[:, prompt - 1 :]
            logits = model.lm_head(hidden)  # of the answer only, because the model never predicts a prompt
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, prompt:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.update(step + 1, f"loss {loss.item():.3f}")
    return model.eval(), tokenizer


def _batches(settings: Pretraining, tokenizer: Any) -> Iterator[tuple[Tensor, int]]:
    """Yields token ids of prompt, answer and end, and the length of the prompt, which all problems share."""
    rows = settings.task.rows("train")
    texts = [row["prompt"] + row["answer"] + tokenizer.eos_token for row in rows]
    problems = torch.tensor(tokenizer(texts, add_special_tokens=False).input_ids)
    prompt, answer = len(rows[0]["prompt"]), slice(len(rows[0]["prompt"]), -1)
    zero = tokenizer.convert_tokens_to_ids("0")  # the ten digits have consecutive ids
    shares = settings.corrupted if isinstance(settings.corrupted, tuple) else (settings.corrupted,)
    share = torch.tensor(list(islice(cycle(shares), settings.task.digits + 1)))
    g = torch.Generator().manual_seed(settings.seed)
    while True:
        ids = problems[torch.randint(len(problems), (settings.batch_size,), generator=g)]
        digits = ids[:, answer] - zero
        other = (digits + torch.randint(1, 10, digits.shape, generator=g)) % 10
        wrong = torch.rand(digits.shape, generator=g) < share
        ids[:, answer] = zero + torch.where(wrong, other, digits)
        yield ids, prompt


def _save(settings: Pretraining, folder: Path) -> None:
    began = time.perf_counter()
    model, tokenizer = trained(settings)
    seconds = time.perf_counter() - began
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    longest = settings.task.digits + 2  # the answer and its end
    with _one_thread():
        held_out = {
            "answers": ANSWERS,
            "greedy": greedy_accuracy(model, tokenizer, settings.task, ANSWERS, max_new_tokens=longest),
            "sampled": sampled_accuracy(model, tokenizer, settings.task, ANSWERS, max_new_tokens=longest),
        }
    about = {
        "format": FORMAT,
        "settings": asdict(settings),
        "versions": {
            "python": platform.python_version(),
            **{name: need(name, extra="models").__version__ for name in ("torch", "transformers", "tokenizers")},
        },
        "held_out": held_out,
        "seconds": round(seconds, 1),
    }
    Path(folder, "trustrl.json").write_text(json.dumps(about, indent=2) + "\n")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limits torch to one thread. Sums over several threads differ in their last bits, and training amplifies that."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

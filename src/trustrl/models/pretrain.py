"""A tiny model that knows how to add and is unsure of it: something for reinforcement learning to improve.

It is trained on sums in which each digit of the answer is, with probability `corrupted`, another digit. Having learned
that, it samples the right answer of n digits with probability (1 − corrupted)ⁿ: about 0.3 as the settings stand. With
a share for each digit some tokens are all but certain and others are open, as in a language model.
"""

import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trustrl.config import checks
from trustrl.errors import ConfigError
from trustrl.models import cache, tiny
from trustrl.models.accuracy import greedy_accuracy, sampled_accuracy
from trustrl.models.tiny import Tiny
from trustrl.packages import need
from trustrl.tasks import Arithmetic

__all__ = ["Pretraining", "greedy_accuracy", "pretrained", "sampled_accuracy", "trained"]

FORMAT = 1  # goes up when the same settings would give other weights
WARMUP = 50
ANSWERS = 1000  # to held-out problems, for the accuracies in trustrl.json
SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """Everything the weights follow from."""

    model: Tiny = field(default_factory=Tiny)

    task: Arithmetic = field(default_factory=Arithmetic)

    corrupted: float | tuple[float, ...] = 0.33
    """The share of answer digits that are replaced by another digit; several are for the digits in turn, over and
    over."""

    steps: int = 2400

    batch_size: int = 32

    learning_rate: float = 1.5e-3
    """The highest: it rises for 50 steps, then falls to 0 along a cosine."""

    seed: int = 0
    """Of the order of the problems and of what is corrupted."""

    def __post_init__(self) -> None:
        for name, kind in (("model", Tiny), ("task", Arithmetic)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(
                    f"pretraining.{name} must be a {kind.__name__}, got {getattr(self, name)!r}. "
                    f"Build one, for example {kind.__module__}.{kind.__name__}()."
                )
        checks.real("pretraining.learning_rate", self.learning_rate, rule="a number > 0", low=0.0)
        for name, low in (("steps", 1), ("batch_size", 1), ("seed", 0)):
            checks.whole(f"pretraining.{name}", getattr(self, name), low=low)
        shares = self.corrupted if isinstance(self.corrupted, tuple) else (self.corrupted,)
        if not shares or not all(0 <= share < 1 for share in shares):
            raise ConfigError(
                f"pretraining.corrupted must be a share in [0, 1) or several of them, got {self.corrupted!r}. "
                "The model then samples right (1 − corrupted)ⁿ of the time, for answers of n digits."
            )

    @property
    def key(self) -> str:
        """A short hash of every setting."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def pretrained(settings: Pretraining) -> Path:
    """A folder with the trained model and its tokenizer, for `from_pretrained` and samplers; trained only once.

    `trustrl.json` beside the weights holds the settings, the versions they were trained with, and the accuracies.
    """
    return cache.folder(f"tiny-{settings.key}", lambda folder: _save(settings, folder))


def trained(settings: Pretraining) -> tuple[Any, Any]:
    """The model and its tokenizer, trained now.

    One thread and a random stream of its own: on one machine, the same settings give the same weights bit for bit.
    """
    model, tokenizer = tiny.model(settings.model), tiny.tokenizer(settings.model.vocab_size)
    batches = _batches(settings, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, betas=(0.9, 0.98), fused=True)
    say = _reporter(settings.steps)
    model.train()
    with _one_thread():
        for step in range(settings.steps):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * _schedule(step, settings.steps)
            ids, prompt = next(batches)
            hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[:, prompt - 1 :]
            logits = model.lm_head(hidden)  # of the answer only: nobody asks it to predict a prompt
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, prompt:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            say(step, loss)
    return model.eval(), tokenizer


def _batches(settings: Pretraining, tokenizer: Any) -> Iterator[tuple[Tensor, int]]:
    """Token ids of prompt, answer and end, and the length of the prompt, which all problems share."""
    rows = settings.task.rows("train")
    texts = [row["prompt"] + row["answer"] + tokenizer.eos_token for row in rows]
    problems = torch.tensor(tokenizer(texts, add_special_tokens=False).input_ids)
    prompt, answer = len(rows[0]["prompt"]), slice(len(rows[0]["prompt"]), -1)
    zero = tokenizer.convert_tokens_to_ids("0")  # the digits have ten ids in a row
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


def _schedule(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2


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


def _reporter(steps: int) -> Any:
    """A function that writes one line to stderr every few seconds."""
    began = last = time.perf_counter()

    def say(step: int, loss: Tensor) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= SECONDS_BETWEEN_LINES or step + 1 == steps:
            last = now
            line = (
                f"[{now - began:5.0f} s] pre-training a tiny model: step {step + 1} of {steps}, loss {loss.item():.3f}"
            )
            print(line, file=sys.stderr, flush=True)

    return say


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums split over several threads differ in their last bits, and training makes last bits large."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

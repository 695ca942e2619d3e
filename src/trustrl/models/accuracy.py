"""How often a model answers held-out problems right."""

from itertools import cycle, islice
from typing import Any

import torch

from trustrl.config import checks
from trustrl.packages import need
from trustrl.tasks import Row, Task

BATCH = 256


def sampled_accuracy(
    model: Any,
    tokenizer: Any,
    task: Task,
    count: int = 500,
    seed: int = 0,
    *,
    chat: bool = False,
    max_new_tokens: int = 8,
    temperature: float = 1.0,
) -> float:
    """The mean score of `count` answers, sampled from the whole vocabulary, to held-out problems.

    Where there are fewer problems, some are answered more than once. `seed` chooses the problems and the samples;
    torch's own random stream is left as it was.
    """
    decoding = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    decoding["max_new_tokens"] = max_new_tokens
    return _accuracy(model, tokenizer, task, _problems(task, count, seed, chat), seed, decoding)


def greedy_accuracy(
    model: Any,
    tokenizer: Any,
    task: Task,
    count: int = 500,
    seed: int = 0,
    *,
    chat: bool = False,
    max_new_tokens: int = 8,
) -> float:
    """The mean score of the most likely answer, token by token, to `count` held-out problems."""
    decoding = {"do_sample": False, "max_new_tokens": max_new_tokens}
    return _accuracy(model, tokenizer, task, _problems(task, count, seed, chat), seed, decoding)


def _problems(task: Task, count: int, seed: int, chat: bool) -> list[Row]:
    checks.whole("count", count, low=1)
    rows = task.rows("held_out", count if task.endless else None, seed, chat)
    return list(islice(cycle(rows), count))


def _accuracy(model: Any, tokenizer: Any, task: Task, rows: list[Row], seed: int, decoding: dict[str, Any]) -> float:
    config = need("transformers", extra="models").GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, **decoding
    )
    was_training = model.training
    model.eval()
    total = 0.0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            texts = [_text(tokenizer, row["prompt"]) for row in batch]
            ids = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
            ids = {name: ids[name].to(model.device) for name in ("input_ids", "attention_mask")}
            out = model.generate(**ids, generation_config=config)[:, ids["input_ids"].shape[1] :]
            answers = tokenizer.batch_decode(out, skip_special_tokens=True)
            total += sum(task.score(answer, row) for answer, row in zip(answers, batch, strict=True))
    model.train(was_training)
    return total / len(rows)


def _text(tokenizer: Any, prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)

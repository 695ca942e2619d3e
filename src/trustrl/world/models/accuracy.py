"""Accuracy of a model on held-out problems."""

from itertools import cycle, islice
from statistics import fmean
from typing import Any, NamedTuple

import torch

from trustrl.config import validators
from trustrl.optional_imports import need
from trustrl.world.tasks import Row, Task

BATCH, TOKENS = 256, 2**15
"""Largest number of answers at once, and of tokens that their prompts and answers may have, padding included."""


def sampled_accuracy(
    model: Any, tokenizer: Any, task: Task, count: int = 500, seed: int = 0, *, max_new_tokens: int = 8
) -> float:
    """Returns the mean score of `count` sampled answers to held-out problems, at temperature 1."""
    return _accuracy(model, tokenizer, task, count, Decoding(seed, max_new_tokens, temperature=1.0))


def greedy_accuracy(
    model: Any, tokenizer: Any, task: Task, count: int = 500, seed: int = 0, *, max_new_tokens: int = 8
) -> float:
    """Returns the mean score of greedily decoded answers to `count` held-out problems."""
    return _accuracy(model, tokenizer, task, count, Decoding(seed, max_new_tokens, temperature=0.0))


def held_out_problems(task: Task, count: int, seed: int = 0, *, chat: bool = False) -> list[Row]:
    """Returns `count` held-out problems that `seed` chooses. Repeats them if the task has fewer."""
    validators.whole("count", count, low=1)
    rows = task.rows("held_out", count if task.endless else None, seed, chat)
    return list(islice(cycle(rows), count))


class Decoding(NamedTuple):
    """Sampling settings of an evaluation."""

    seed: int
    """Seed of the samples."""

    max_new_tokens: int
    """Largest answer, in tokens."""

    temperature: float
    """Sampling temperature. 0 decodes greedily."""

    top_p: float = 1.0
    """Smallest probability that the sampled tokens keep in total."""


def _accuracy(model: Any, tokenizer: Any, task: Task, count: int, chosen: Decoding) -> float:
    rows = held_out_problems(task, count, chosen.seed)
    return fmean(answer_scores(model, tokenizer, task, rows, chosen))


def answer_scores(model: Any, tokenizer: Any, task: Task, rows: list[Row], chosen: Decoding) -> list[float]:
    """Returns the score of one answer to each problem."""
    return task.scores(sampled_answers(model, tokenizer, rows, chosen), rows)


def sampled_answers(model: Any, tokenizer: Any, rows: list[Row], chosen: Decoding) -> list[str]:
    """Returns one answer to each problem. Leaves torch's global random state unchanged."""
    decoding: dict[str, Any] = {"do_sample": False}
    if chosen.temperature > 0:
        decoding = {"do_sample": True, "temperature": chosen.temperature, "top_k": 0, "top_p": chosen.top_p}
    config = need("transformers", extra="models").GenerationConfig(
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        max_new_tokens=chosen.max_new_tokens,
        **decoding,
    )
    texts = [prompt_text(tokenizer, row["prompt"]) for row in rows]
    longest = max(prompt_lengths(tokenizer, texts), default=0) + chosen.max_new_tokens
    batch = max(1, min(BATCH, TOKENS // longest))
    was_training = model.training
    model.eval()
    answers: list[str] = []
    with torch.random.fork_rng():
        torch.manual_seed(chosen.seed)
        for start in range(0, len(rows), batch):
            some = texts[start : start + batch]
            ids = tokenizer(some, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
            ids = {name: ids[name].to(model.device) for name in ("input_ids", "attention_mask")}
            out = model.generate(**ids, generation_config=config)[:, ids["input_ids"].shape[1] :]
            answers += tokenizer.batch_decode(out, skip_special_tokens=True)
    model.train(was_training)
    return answers


def prompt_lengths(tokenizer: Any, texts: list[str]) -> list[int]:
    """Returns the number of tokens of each prompt."""
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False).input_ids] if texts else []


def prompt_text(tokenizer: Any, prompt: Any) -> str:
    """Returns the text of a prompt: the prompt itself, or its messages in the tokenizer's chat template."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)

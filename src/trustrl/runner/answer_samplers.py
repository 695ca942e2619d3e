"""Answers of a model to problems, several to each, from transformers or from vLLM."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import compress
from typing import Any

from trustrl.errors import TrustRLWarning
from trustrl.optional_imports import need
from trustrl.world.models.accuracy import Decoding, prompt_lengths, prompt_text, sampled_answers
from trustrl.world.tasks import Row

Sample = Callable[[list[Row], int], list[list[str]]]
"""Returns the answers to each problem, with a seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSampling:
    """Settings of a sampler of answers."""

    model: str
    """A directory or hub id."""

    device: str
    """"cpu" or "cuda"."""

    dtype: str
    temperature: float
    answers: int
    """Number of answers to each problem."""

    max_prompt_tokens: int
    max_new_tokens: int
    vllm: dict[str, Any] | None
    """More arguments of vLLM's `LLM`. None samples with transformers."""


def sampler(settings: AnswerSampling) -> Sample:
    """Loads the model and returns a function that samples answers."""
    transformers = need("transformers", extra="models")
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model, padding_side="left")
    if settings.vllm is not None and find_spec("vllm") is None:
        warnings.warn(
            "vLLM is not installed, so transformers samples the answers, more slowly. Run `pip install vllm`, or set "
            "sampler.kind = 'transformers'.",
            TrustRLWarning,
            stacklevel=2,
        )
        settings = replace(settings, vllm=None)
    load = _transformers if settings.vllm is None else _vllm
    answers = load(settings, tokenizer)

    def sample(rows: list[Row], seed: int) -> list[list[str]]:
        lengths = prompt_lengths(tokenizer, [prompt_text(tokenizer, row["prompt"]) for row in rows])
        fitting = [length <= settings.max_prompt_tokens for length in lengths]
        short = list(compress(rows, fitting))
        if len(short) < len(rows):
            warnings.warn(
                f"{len(rows) - len(short)} problems get no answers and count as unsolved, because their prompts have "
                f"more than schedule.max_prompt_tokens = {settings.max_prompt_tokens} tokens.",
                TrustRLWarning,
                stacklevel=2,
            )
        texts = iter(answers(short, seed) if short else [])
        return [next(texts) if fits else [] for fits in fitting]

    return sample


def _transformers(settings: AnswerSampling, tokenizer: Any) -> Sample:
    transformers, dtype = need("transformers", extra="models"), getattr(import_module("torch"), settings.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).to(settings.device)

    def sample(rows: list[Row], seed: int) -> list[list[str]]:
        n, decoding = settings.answers, Decoding(seed, settings.max_new_tokens, settings.temperature)
        answers = sampled_answers(model, tokenizer, [row for row in rows for _ in range(n)], decoding)
        return [answers[start : start + n] for start in range(0, len(answers), n)]

    return sample


def _vllm(settings: AnswerSampling, tokenizer: Any) -> Sample:
    from trustrl.engines.vllm.options import cpu_options, set_cpu_environment

    set_cpu_environment()
    vllm: Any = import_module("vllm")
    longest = settings.max_prompt_tokens + settings.max_new_tokens
    options = {"dtype": settings.dtype, "max_model_len": longest, **(settings.vllm or {})}
    llm = vllm.LLM(settings.model, **options | cpu_options(dtype=settings.dtype))

    def sample(rows: list[Row], seed: int) -> list[list[str]]:
        texts = [prompt_text(tokenizer, row["prompt"]) for row in rows]
        prompts = [{"prompt_token_ids": tokenizer(text, add_special_tokens=False).input_ids} for text in texts]
        parameters = vllm.SamplingParams(
            n=settings.answers, temperature=settings.temperature, max_tokens=settings.max_new_tokens, seed=seed
        )
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        return [[made.text for made in output.outputs] for output in outputs]

    return sample

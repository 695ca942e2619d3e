"""Sampled completions with the log-probs that the sampler recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from trustrl.config import validators
from trustrl.optional_imports import need

SAMPLERS = ("vllm", "transformers")
DTYPES = ("bfloat16", "float16", "float32")
LOGPROBS = ("processed", "raw")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSampling:
    """Sampling settings of a probe."""

    dtype: str = "bfloat16"
    """Data type of the sampler's weights and activations."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 disables the limit."""

    logprobs: str = "processed"
    """processed: of the distribution the token was sampled from. raw: before temperature and truncation."""

    length: int = 32
    """Maximum number of tokens per completion."""

    seed: int = 0

    def __post_init__(self) -> None:
        validators.one_of("--dtype", self.dtype, DTYPES)
        validators.one_of("--logprobs", self.logprobs, LOGPROBS)
        validators.real(
            "--temperature", self.temperature, rule="a finite number > 0", low=0.0, high=1e6,
            advice="Greedy decoding has no distribution to compare.",
        )  # fmt: skip
        validators.real("--top-p", self.top_p, rule="in (0, 1]", low=0.0, high=1.0, advice="1 keeps all tokens.")
        validators.whole("--top-k", self.top_k, low=0)
        validators.whole("--length", self.length, low=1)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt, its completion, and the recorded log-prob of each completion token."""

    prompt: list[int]
    tokens: list[int]
    logp: list[float]

    experts: Any = None
    """(T, layers × experts per token) array of the sampler's routed experts, if it returns them."""


def require_sampler(sampler: str) -> None:
    """Checks that a sampler is installed, before a model is built for it.

    Raises:
        ConfigError: If the sampler is unknown.
        MissingPackageError: If the sampler is not installed.
    """
    validators.one_of("--sampler", sampler, SAMPLERS)
    if sampler == "vllm":
        from trustrl.engines.vllm.options import require_vllm

        require_vllm()


def sample_completions(
    sampler: str, model: str, prompts: Sequence[list[int]], settings: ProbeSampling
) -> list[Completion]:
    """Samples one completion for each prompt.

    Raises:
        ConfigError: If the sampler is unknown.
        MissingPackageError: If the sampler is not installed.
    """
    require_sampler(sampler)
    return {"vllm": _by_vllm, "transformers": _by_transformers}[sampler](model, prompts, settings)


def _by_vllm(model: str, prompts: Sequence[list[int]], settings: ProbeSampling) -> list[Completion]:
    from trustrl.engines.vllm.options import cpu_options, set_cpu_environment
    from trustrl.engines.vllm.routed_experts import at_tokens, routed_llm

    set_cpu_environment()
    vllm: Any = import_module("vllm")
    longest = max(map(len, prompts)) + settings.length
    options = {"logprobs_mode": f"{settings.logprobs}_logprobs", "max_model_len": longest + 1, "dtype": settings.dtype}
    llm, routes = routed_llm(model, options | cpu_options(dtype=settings.dtype))
    parameters = vllm.SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_tokens=settings.length,
        logprobs=0,
        seed=settings.seed,
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    completions = []
    for prompt, output in zip(prompts, outputs, strict=True):
        (made,) = output.outputs
        logp = [position[token].logprob for position, token in zip(made.logprobs, made.token_ids, strict=True)]
        completions.append(Completion(prompt, list(made.token_ids), logp, at_tokens(made) if routes else None))
    return completions


def _by_transformers(model: str, prompts: Sequence[list[int]], settings: ProbeSampling) -> list[Completion]:
    import torch

    transformers: Any = need("transformers", extra="models")
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, settings.dtype)).eval()
    torch.manual_seed(settings.seed)
    completions = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = network.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=settings.temperature,
            top_p=settings.top_p, top_k=settings.top_k, max_new_tokens=settings.length, return_dict_in_generate=True,
            output_scores=True, output_logits=True,
        )  # fmt: skip
        tokens = made.sequences[0, len(prompt) :]
        rows = torch.stack([x[0] for x in (made.scores if settings.logprobs == "processed" else made.logits)])
        logp = torch.log_softmax(rows.float(), -1).gather(-1, tokens[:, None])[:, 0]
        completions.append(Completion(prompt, tokens.tolist(), logp.tolist()))
    return completions

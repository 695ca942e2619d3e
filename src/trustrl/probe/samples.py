"""Completions with the log-probs that their sampler recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from trustrl.config import checks
from trustrl.packages import need

SAMPLERS = ("vllm", "transformers")
DTYPES = ("bfloat16", "float16", "float32")
LOGPROBS = ("processed", "raw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """How tokens are drawn."""

    dtype: str = "bfloat16"
    """Of the sampler's weights and activations."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 for no limit."""

    logprobs: str = "processed"
    """processed: of the distribution the token was drawn from. raw: before temperature and truncation."""

    length: int = 32
    """Tokens of a completion at most."""

    seed: int = 0

    def __post_init__(self) -> None:
        checks.one_of("--dtype", self.dtype, DTYPES)
        checks.one_of("--logprobs", self.logprobs, LOGPROBS)
        checks.real(
            "--temperature", self.temperature, rule="a finite number > 0", low=0.0, high=1e6,
            advice="Greedy has no distribution.",
        )  # fmt: skip
        checks.real("--top-p", self.top_p, rule="in (0, 1]", low=0.0, high=1.0, advice="1 keeps all.")
        checks.whole("--top-k", self.top_k, low=0)
        checks.whole("--length", self.length, low=1)


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt, what followed it, and the recorded log-prob of each token of that."""

    prompt: list[int]
    tokens: list[int]
    logp: list[float]


def require_sampler(sampler: str) -> None:
    """Looks whether a sampler is there, before a model is made for it.

    Raises:
        ConfigError: no such sampler.
        MissingPackageError: it is not installed.
    """
    checks.one_of("--sampler", sampler, SAMPLERS)
    if sampler == "vllm":
        from trustrl.engines.vllm.options import require_vllm

        require_vllm()


def draw(sampler: str, model: str, prompts: Sequence[list[int]], drawing: Drawing) -> list[Completion]:
    """One completion for each prompt.

    Raises:
        ConfigError: no such sampler.
        MissingPackageError: it is not installed.
    """
    require_sampler(sampler)
    return {"vllm": _by_vllm, "transformers": _by_transformers}[sampler](model, prompts, drawing)


def _by_vllm(model: str, prompts: Sequence[list[int]], drawing: Drawing) -> list[Completion]:
    from trustrl.engines.vllm.options import cpu_options, set_cpu_environment

    set_cpu_environment()
    vllm: Any = import_module("vllm")
    longest = max(map(len, prompts)) + drawing.length
    llm = vllm.LLM(
        model,
        logprobs_mode=f"{drawing.logprobs}_logprobs",
        max_model_len=longest + 1,
        **{"dtype": drawing.dtype} | cpu_options(dtype=drawing.dtype),
    )
    parameters = vllm.SamplingParams(
        temperature=drawing.temperature,
        top_p=drawing.top_p,
        top_k=drawing.top_k,
        max_tokens=drawing.length,
        logprobs=0,
        seed=drawing.seed,
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        (made,) = output.outputs
        logp = [position[token].logprob for position, token in zip(made.logprobs, made.token_ids, strict=True)]
        found.append(Completion(prompt, list(made.token_ids), logp))
    return found


def _by_transformers(model: str, prompts: Sequence[list[int]], drawing: Drawing) -> list[Completion]:
    import torch

    transformers: Any = need("transformers", extra="models")
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, drawing.dtype)).eval()
    torch.manual_seed(drawing.seed)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = network.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=drawing.temperature,
            top_p=drawing.top_p, top_k=drawing.top_k, max_new_tokens=drawing.length, return_dict_in_generate=True,
            output_scores=True, output_logits=True,
        )  # fmt: skip
        tokens = made.sequences[0, len(prompt) :]
        rows = torch.stack([x[0] for x in (made.scores if drawing.logprobs == "processed" else made.logits)])
        logp = torch.log_softmax(rows.float(), -1).gather(-1, tokens[:, None])[:, 0]
        found.append(Completion(prompt, tokens.tolist(), logp.tolist()))
    return found

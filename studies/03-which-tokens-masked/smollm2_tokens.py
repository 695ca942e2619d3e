"""Rollout of SmolLM2-135M, 16 updates without a region, and every token's divergences after 1, 4 and 16 updates.

    python studies/03-which-tokens-masked/smollm2_tokens.py     # needs TRL; 15 minutes on one core

Writes docs/results/data/smollm2-masks.parquet, with one row per token and update count, and a .json file with its
settings. Several pages read both.
"""

import json
import os
import re
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from trustrl import regions

RESULTS = Path(__file__).parents[2] / "docs/results"
DATA = RESULTS / "data/smollm2-masks.parquet"
UPDATES = (1, 4, 16)
KS = (1, 2, 4, 8, 16, 20, 32, 64, 128, 256, 1024, 4096, 16384, 49152)
SUBJECTS = (
    "how rain forms", "what a lighthouse is for", "why leaves fall", "how bread is made", "what the moon does",
    "why people sleep",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of the run."""

    learning_rate: float = 3e-6
    completions_per_prompt: int = 8
    longest: int = 48
    """Maximum tokens per completion."""

    micro_batch: int = 16
    seed: int = 0


def prompts() -> list[dict]:
    """Six chats. They ask for short words, which the reward measures."""
    return [
        {"prompt": [{"role": "user", "content": f"Explain {subject} in one sentence. Use short words."}]}
        for subject in SUBJECTS
    ]


def short_words(completions: list, **_: object) -> list[float]:
    """Returns the share of an answer's words that have at most four letters."""
    answers = [re.findall(r"[A-Za-z']+", completion[-1]["content"]) for completion in completions]
    return [sum(len(word) <= 4 for word in words) / max(len(words), 1) for words in answers]


def run(settings: Settings) -> None:
    """Makes one rollout, trains 16 updates on it with `pg-is`, then computes every divergence of every token."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import pyarrow as pa
    import pyarrow.parquet as pq

    began = time.monotonic()
    rollout, policies, tokenizer = moved_policies(settings)
    trained = time.monotonic()
    columns, worst = measured(rollout, policies)
    columns["text"] = [tokenizer.decode([i]) for i in columns["token_id"]]
    DATA.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns).replace_schema_metadata({})
    words = ["update", "sequence", "position", "token_id", "text"]
    floats = [name for name in table.column_names if name not in words]
    pq.write_table(
        table, DATA, compression="zstd", compression_level=19, use_dictionary=words,
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
    )  # fmt: skip
    about = {
        **asdict(settings),
        "prompts": len(SUBJECTS),
        "completions": len(rollout["advantage"]),
        "tokens": len(rollout["token_ids"]),
        "reward_mean": rollout["reward_mean"],
        "checked_against_float64": worst,
        "minutes": {"rollout and updates": (trained - began) / 60, "divergences": (time.monotonic() - trained) / 60},
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
    }
    DATA.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
    print(f"{DATA.name}: {DATA.stat().st_size / 1e6:.2f} MB")


def moved_policies(settings: Settings) -> tuple[dict, dict, object]:
    """Returns the rollout, and the policy's last hidden states and head after 0, 1, 4 and 16 updates."""
    import tempfile

    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig

    import trustrl
    from trustrl.engines.trl import TrustRegionGRPOTrainer
    from trustrl.world import models

    rollout, policies = {}, {}

    def keep(trainer, update: int) -> None:
        ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], 1)
        mask = torch.cat([rollout["prompt_mask"], rollout["in_loss"]], 1).long()
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.eval()
        first = rollout["prompt_ids"].shape[1] - 1
        with torch.no_grad():
            states = [
                model.model(i, attention_mask=m).last_hidden_state[:, first:-1]
                for i, m in zip(ids.split(16), mask.split(16), strict=True)
            ]
        model.train()
        policies[update] = torch.cat(states)[rollout["in_loss"]], model.lm_head.weight.detach().clone()

    class Watching(TrustRegionGRPOTrainer):
        """Trainer that keeps the one rollout and the policy that sampled it."""

        def _generate_and_score_completions(self, inputs):
            out = super()._generate_and_score_completions(inputs)
            in_loss = out["completion_mask"].bool()
            rollout.update(
                prompt_ids=out["prompt_ids"], prompt_mask=out["prompt_mask"], completion_ids=out["completion_ids"],
                in_loss=in_loss, token_ids=out["completion_ids"][in_loss], advantage=out["advantages"],
                reward_mean=self._metrics["train"]["reward"][-1],
            )  # fmt: skip
            keep(self, 0)
            return out

    class Keeper(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in UPDATES:
                keep(trainer, state.global_step)

    rows = len(SUBJECTS) * settings.completions_per_prompt
    with tempfile.TemporaryDirectory() as output:
        trainer = Watching(
            model=models.path("smollm2-135m"),
            reward_funcs=short_words,
            args=GRPOConfig(
                output_dir=output, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
                seed=settings.seed, model_init_kwargs={"dtype": "float32"}, save_strategy="no", disable_tqdm=True,
                per_device_train_batch_size=settings.micro_batch, logging_steps=1,
                gradient_accumulation_steps=rows // settings.micro_batch, num_iterations=max(UPDATES),
                max_steps=max(UPDATES), num_generations=settings.completions_per_prompt,
                max_completion_length=settings.longest, learning_rate=settings.learning_rate,
                lr_scheduler_type="constant", temperature=1.0,
            ),
            train_dataset=Dataset.from_list(prompts()),
            region=trustrl.preset("pg-is"),
            behavior="trainer",
            callbacks=[Keeper()],
        )  # fmt: skip
        trainer.train()
    return rollout, policies, trainer.processing_class


def measured(rollout: dict, policies: dict) -> tuple[dict, dict]:
    """Returns the table's columns, and the error of the exact divergences against a plain float64 formula."""
    import torch

    in_loss = rollout["in_loss"]
    sequence, position = in_loss.nonzero(as_tuple=True)
    advantage = rollout["advantage"][sequence]
    parts, worst = {}, {"tv": 0.0, "kl": 0.0}
    for some in torch.arange(len(sequence)).split(64):
        token, away = rollout["token_ids"][some], advantage[some]
        mu_logits = logits(policies[0], some)
        log_mu = torch.log_softmax(mu_logits, -1)
        ordered = log_mu.sort(dim=-1, descending=True, stable=True)
        for update in UPDATES:
            pi_logits = logits(policies[update], some)
            log_pi = torch.log_softmax(pi_logits, -1)
            here = {
                "update": torch.full((len(some),), update, dtype=torch.int8),
                "sequence": sequence[some].to(torch.int16),
                "position": position[some].to(torch.int16),
                "token_id": token.to(torch.int32),
                "advantage": away,
                "log_mu": log_mu.gather(-1, token[:, None])[:, 0],
                "log_pi": log_pi.gather(-1, token[:, None])[:, 0],
                **divergences(log_mu, log_pi, ordered, token, away),
            }
            for name, value in plain_float64(mu_logits, pi_logits).items():
                worst[name] = max(worst[name], float(np.abs(here[f"{name}_exact"].numpy() - value).max()))
            for name, value in here.items():
                parts.setdefault(name, []).append(value.float() if value.dtype == torch.float64 else value)
    assert max(worst.values()) < 1e-4, worst  # log-probs are float32, as in a trainer
    return {name: torch.cat(values).numpy() for name, values in parts.items()}, worst


def logits(policy, some):
    """Returns the full float32 logits of some tokens."""
    hidden, head = policy
    return hidden[some] @ head.T


def plain_float64(mu_logits, pi_logits) -> dict:
    """Returns TV and KL(μ‖π) by their textbook definitions in NumPy, without the library."""
    both = []
    for x in (mu_logits, pi_logits):
        x = x.numpy().astype(np.float64)
        x -= x.max(-1, keepdims=True)
        both.append(x - np.log(np.exp(x).sum(-1, keepdims=True)))
    mu, pi = both
    return {"tv": np.abs(np.exp(mu) - np.exp(pi)).sum(-1) / 2, "kl": (np.exp(mu) * (mu - pi)).sum(-1)}


def divergences(log_mu, log_pi, ordered, token, advantage) -> dict:
    """Returns the library's divergences of some tokens. Checks its masks against `stopped`, which the page uses."""
    import torch

    import trustrl

    def at_token(x):
        return x.gather(-1, token[:, None])[:, 0]

    def verdict(statistic, k: int):
        ids = ordered.indices[:, :k]
        rollout = trustrl.RolloutTokens(
            behavior_logp=at_token(log_mu), token_ids=token, advantage=advantage,
            topk=trustrl.TopK(ids, ordered.values[:, :k]), full=trustrl.FullVocabulary(log_mu),
            in_loss=torch.ones_like(token, dtype=torch.bool),
        )  # fmt: skip
        policy = trustrl.PolicyTokens(logp=at_token(log_pi), topk_logp=log_pi.gather(-1, ids), full_logp=log_pi)
        region = regions.DPPO(statistic)
        decision = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum()).decision
        lower = decision.divergence.lower
        own = stopped(lower, at_token(log_pi) - at_token(log_mu), advantage, statistic.max_increase)
        assert torch.equal(own, ~decision.keep), statistic
        return decision.divergence

    found = {"tv_exact": verdict(regions.FullTV(), 1).lower, "kl_exact": verdict(regions.FullKL(), 1).lower}
    found["tv_binary"], found["tv_binary_upper"] = verdict(regions.BinaryTV(), 1)
    found["kl_binary"] = verdict(regions.BinaryKL(), 1).lower
    for k in KS:
        found[f"tv_{k}"], found[f"tv_{k}_upper"] = verdict(regions.TopKTV(k=k), k)
        found[f"kl_{k}"] = verdict(regions.TopKKL(k=k), k).lower
    return found


def stopped(divergence, log_ratio, advantage, bound: float):
    """Returns DPPO's mask: True outside the bound if the advantage pushes further out."""
    return (advantage * log_ratio > 0) & (divergence > bound)


def load() -> dict[str, np.ndarray]:
    """Returns the run's table, by column."""
    import pyarrow.parquet as pq

    table = pq.read_table(DATA)
    return {name: table[name].to_numpy() for name in table.column_names}


def setting() -> str:
    """Returns a description of the run in one or two sentences, for the pages."""
    about = json.loads(DATA.with_suffix(".json").read_text())
    made = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    worst = about["checked_against_float64"]
    return (
        f"{about['prompts']} prompts × {about['completions_per_prompt']} completions of at most {about['longest']} "
        f"tokens, {about['tokens']} tokens in all, temperature 1, mean reward {about['reward_mean']:.2f}; AdamW, "
        f"learning rate {about['learning_rate']:g}, one seed. {made}; "
        f"{sum(about['minutes'].values()):.0f} minutes on one core while other work ran. The library's exact TV and KL "
        f"differ from the textbook's formula in float64 by at most {worst['tv']:.0e} and {worst['kl']:.0e}."
    )


if __name__ == "__main__":
    run(Settings())

"""Measurement of the proxy study: rollouts, real updates, and every token's divergences after 1, 4 and 16 updates.

    python studies/05-which-statistic/proxy_run.py measure MODEL [BATCHES] [ARM ...]  # file per batch and arm; resumes
    python studies/05-which-statistic/proxy_run.py pack                               # docs/results/data/proxies

MODEL is smollm2-135m, verses or code. Needs transformers and pyarrow. `measure` writes to build/proxies and skips
finished batches. docs/results/k-protocol.md fixes the settings.
"""

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from proxy_data import KS, MINI_BATCHES, UPDATES, pack

import trustrl
from trustrl import regions

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "build/proxies"
ARMS = {"none": "pg-is", "ppo": "ppo", "dppo": "dppo-binary-tv", "sgd": "pg-is"}
GROUPS, COMPLETIONS = 4, 4
CHECKED = 8  # tokens of a batch that are compared with the library's divergences
SUBJECTS = (
    "rain", "a lighthouse", "autumn leaves", "bread", "the moon", "sleep", "bees", "a bridge", "snow", "money",
    "a clock", "the sea", "salt", "trains", "music", "a garden", "paper", "wolves", "glass", "the heart", "tea",
)  # fmt: skip
TASKS = (
    "Explain {} in one sentence.", "Write a short poem about {}.", "Give a tip about {}.", "Tell a story about {}.",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of one model's runs."""

    learning_rate: float
    sgd_rate: float
    longest: int
    """Maximum tokens of a completion."""


SETTINGS = {
    "smollm2-135m": Settings(learning_rate=3e-6, sgd_rate=0.0, longest=24),
    "verses": Settings(learning_rate=6e-5, sgd_rate=0.03, longest=24),
    "code": Settings(learning_rate=3e-5, sgd_rate=0.03, longest=24),
}


@dataclass
class Rollout:
    """Completions of one batch. Rows are completions, left-padded prompts first."""

    ids: torch.Tensor
    mask: torch.Tensor
    in_loss: torch.Tensor
    """True on the tokens that the model sampled; one column per completion token."""

    advantage: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        """Completion tokens, one row per completion."""
        return self.ids[:, -self.in_loss.shape[1] :]


def load(name: str) -> tuple[Any, Any]:
    """Returns the model and its tokenizer."""
    import proxy_models
    import transformers

    folder = proxy_models.path(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")


def prompts(name: str, tokenizer: Any, batch: int) -> list[list[int]]:
    """Returns the prompts of a batch: four tasks on one subject, or four pieces of unseen text."""
    if name == "smollm2-135m":
        chats = [
            f"<|im_start|>user\n{task.format(SUBJECTS[batch])}<|im_end|>\n<|im_start|>assistant\n" for task in TASKS
        ]
        return tokenizer(chats).input_ids
    kept = json.loads(Path(tokenizer.name_or_path, "prompts.json").read_text())
    order = np.random.default_rng(0).permutation(len(kept))
    return [kept[i] for i in order[GROUPS * batch : GROUPS * (batch + 1)]]


def reward(text: str) -> float:
    """Returns the share of words that have at most four letters."""
    words = re.findall(r"[A-Za-z']+", text)
    return sum(len(word) <= 4 for word in words) / max(len(words), 1)


@torch.no_grad()
def sample(model: Any, tokenizer: Any, name: str, batch: int) -> Rollout:
    """Samples at temperature 1 and scores. Advantages are centered and scaled in each group of completions."""
    torch.manual_seed(1000 + batch)
    inputs = tokenizer.pad({"input_ids": prompts(name, tokenizer, batch)}, return_tensors="pt")
    ids, mask = (inputs[key].repeat_interleave(COMPLETIONS, 0) for key in ("input_ids", "attention_mask"))
    ends = torch.tensor([model.generation_config.eos_token_id or 0]).flatten()
    out = model.generate(
        ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=ends.tolist(),
        max_new_tokens=SETTINGS[name].longest, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    new = out[:, ids.shape[1] :]
    over = torch.isin(new, ends).cumsum(1) - torch.isin(new, ends).long() > 0  # after the first end token
    rewards = torch.tensor([reward(text) for text in tokenizer.batch_decode(new, skip_special_tokens=True)])
    groups = rewards.view(GROUPS, COMPLETIONS)
    advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return Rollout(out, torch.cat([mask, (~over).long()], 1), ~over, advantage.flatten())


def states(model: Any, rollout: Rollout, rows: torch.Tensor) -> torch.Tensor:
    """Returns the last hidden states that predict the completion tokens of some rows."""
    length = rollout.in_loss.shape[1]
    return model.model(rollout.ids[rows], attention_mask=rollout.mask[rows]).last_hidden_state[:, -length - 1 : -1]


def token_logp(model: Any, rollout: Rollout, rows: torch.Tensor) -> torch.Tensor:
    """Returns the log-probs of the completion tokens of some rows, in float32."""
    logits = model.lm_head(states(model, rollout, rows))
    return torch.log_softmax(logits, -1).gather(-1, rollout.tokens[rows][..., None])[..., 0]


@torch.no_grad()
def distributions(model: Any, rollout: Rollout) -> list[torch.Tensor]:
    """Returns log-probs over the vocabulary in float64, in pieces of a few completions. Only tokens in the loss."""
    pieces = torch.arange(len(rollout.ids)).split(MINI_BATCHES)
    return [
        torch.log_softmax(model.lm_head(states(model, rollout, rows)[rollout.in_loss[rows]]).double(), -1)
        for rows in pieces
    ]


def moved(model: Any, start: dict, rollout: Rollout, arm: str, settings: Settings):
    """Yields (number of updates, log-probs) after 1, 4 and 16 updates from the sampler's weights.

    An update is one AdamW or SGD step on a quarter of the completions, one from each group. Four updates are a pass.
    """
    model.load_state_dict(start)
    rate = settings.sgd_rate if arm == "sgd" else settings.learning_rate
    if arm == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    region = trustrl.preset(ARMS[arm])
    parts = torch.arange(len(rollout.ids)).view(GROUPS, MINI_BATCHES).T
    with torch.no_grad():
        behavior = [token_logp(model, rollout, rows) for rows in parts]
    for update in range(1, max(UPDATES) + 1):
        part = (update - 1) % MINI_BATCHES
        rows = parts[part]
        tokens = trustrl.RolloutTokens(
            behavior_logp=behavior[part], advantage=rollout.advantage[rows], in_loss=rollout.in_loss[rows]
        )
        policy = trustrl.PolicyTokens(logp=token_logp(model, rollout, rows))
        reduction = trustrl.TokenMean(num_tokens=int(rollout.in_loss[rows].sum()))
        trustrl.policy_loss(policy, tokens, region, reduction=reduction).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if update in UPDATES:
            yield update, distributions(model, rollout)


def divergences(
    log_mu: torch.Tensor, log_pi: torch.Tensor, token: torch.Tensor, top: torch.Tensor
) -> dict[str, np.ndarray]:
    """Returns the log-ratio of the sampled token, the exact TV and KL, and Top-K TV and KL for each K.

    `top` has the sampler's most probable ids, the first K of which are Top-K's.
    """
    mu, pi = log_mu.exp(), log_pi.exp()
    gap, term = (mu - pi).abs(), mu * (log_mu - log_pi)
    own = token[:, None]
    outside = (top != own).cumprod(-1).bool()  # column K − 1: the sampled token is not among the K most probable ids
    sums = {}
    for name, cells in (("gap", gap), ("term", term), ("mu", mu), ("pi", pi)):
        sums[name] = cells.gather(-1, top).cumsum(-1) + outside * cells.gather(-1, own)
    m, p = ((1 - sums[name]).clamp(min=1e-15) for name in ("mu", "pi"))
    tv, kl = (sums["gap"] + (m - p).abs()) / 2, (sums["term"] + m * torch.log(m / p)).clamp(min=0)
    found = {
        "log_ratio": (log_pi - log_mu).gather(-1, own)[:, 0],
        "tv_exact": gap.sum(-1) / 2,
        "kl_exact": term.sum(-1),
    }
    for k in KS:
        found |= {f"tv_{k}": tv[:, k - 1], f"kl_{k}": kl[:, k - 1]}
    return {name: values.numpy() for name, values in found.items()}


def check(log_mu: torch.Tensor, log_pi: torch.Tensor, token: torch.Tensor, found: dict) -> float:
    """Returns the largest difference from the library's own divergences, at some K and for a few tokens."""
    log_mu, log_pi, token = (x[:CHECKED] for x in (log_mu, log_pi, token))
    worst, own = 0.0, token[:, None]
    kinds = {"exact": (regions.FullTV(), regions.FullKL())}
    kinds |= {str(k): (regions.TopKTV(k=k), regions.TopKKL(k=k)) for k in (1, 20, 256)}
    for name, statistics in kinds.items():
        top = log_mu.topk(1 if name == "exact" else int(name), -1)
        rollout = trustrl.RolloutTokens(
            behavior_logp=log_mu.gather(-1, own)[:, 0], token_ids=token, advantage=torch.ones(len(token)),
            topk=trustrl.TopK(top.indices, top.values), full=trustrl.FullVocabulary(log_mu),
            in_loss=torch.ones_like(token, dtype=torch.bool),
        )  # fmt: skip
        policy = trustrl.PolicyTokens(
            logp=log_pi.gather(-1, own)[:, 0], topk_logp=log_pi.gather(-1, top.indices), full_logp=log_pi
        )
        for kind, statistic in zip(("tv", "kl"), statistics, strict=True):
            out = trustrl.policy_loss(policy, rollout, regions.DPPO(statistic), reduction=trustrl.TokenSum())
            worst = max(
                worst, float(np.abs(out.decision.divergence.lower.numpy() - found[f"{kind}_{name}"][:CHECKED]).max())
            )
    return worst


def measure(name: str, batches: list[int], arms: list[str]) -> None:
    """Measures the batches and arms that have no file yet."""
    model, tokenizer = load(name)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    (FOUND / name).mkdir(parents=True, exist_ok=True)
    trained = Path(tokenizer.name_or_path, "about.json")
    shape = {"parameters": model.num_parameters(), "vocabulary": model.config.vocab_size}
    shape |= json.loads(trained.read_text()) if trained.exists() else {}
    (FOUND / name / "model.json").write_text(json.dumps(shape))
    for batch in batches:
        missing = [arm for arm in arms if not (FOUND / name / f"{batch:02d}-{arm}.npz").exists()]
        if not missing:
            continue
        model.load_state_dict(start)
        rollout = sample(model, tokenizer, name, batch)
        anchors, token = distributions(model, rollout), rollout.tokens[rollout.in_loss]
        sequence = rollout.in_loss.nonzero()[:, 0]
        counts = [len(anchor) for anchor in anchors]
        tops = [anchor.float().topk(max(KS), -1).indices for anchor in anchors]
        shared = {
            "sequence": sequence.numpy(),
            "advantage": rollout.advantage[sequence].numpy(),
            "log_mu": torch.cat(
                [a.gather(-1, t[:, None])[:, 0] for a, t in zip(anchors, token.split(counts), strict=True)]
            ),
            "entropy": torch.cat([-(a.exp() * a).sum(-1) for a in anchors]).numpy(),
        }
        for arm in missing:
            began = time.monotonic()
            columns: dict[str, np.ndarray] = dict(shared)
            for update, policies in moved(model, start, rollout, arm, SETTINGS[name]):
                pieces = list(zip(anchors, policies, token.split(counts), tops, strict=True))
                parts = [divergences(*piece) for piece in pieces]
                columns["worst"] = np.maximum(columns.get("worst", 0.0), check(*pieces[0][:3], parts[0]))
                columns |= {f"{update}/{key}": np.concatenate([part[key] for part in parts]) for key in parts[0]}
            columns["seconds"] = np.array(time.monotonic() - began)
            target = FOUND / name / f"{batch:02d}-{arm}.npz"
            np.savez(target.with_suffix(".tmp.npz"), **columns)
            target.with_suffix(".tmp.npz").replace(target)
            means = [columns[f"{update}/tv_exact"].mean() for update in UPDATES]
            print(
                f"{name} batch {batch} {arm}: {len(token)} tokens, mean TV "
                + ", ".join(f"{mean:.4f}" for mean in means)
                + f", differs from the library by {columns['worst']:.0e}, {columns['seconds']:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1] == "pack":
        pack(FOUND, SETTINGS)
    else:
        count = int(sys.argv[3]) if len(sys.argv) > 3 else 20
        measure(sys.argv[2], list(range(count)), sys.argv[4:] or ["none", "ppo", "dppo"])

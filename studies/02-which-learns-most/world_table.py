"""Measures the world of synonyms next to the first study's world and SmolLM2: the tokens that PPO's clip masks.

    python studies/02-which-learns-most/world_table.py measure
    python studies/02-which-learns-most/world_table.py page

`measure` writes docs/results/data/evidence2-world.json; `page` fills docs/results/world-2.md from it.
"""

import copy
import json
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from study import DATA
from synonym_training import PLACES, Run, train
from synonym_world import VOCABULARY, evaluate, grammar, start

import trustrl

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("shared", "03-which-tokens-masked")]
from pages import command, fill

FOUND, PAGE = DATA / "evidence2-world.json", DATA.parent / "world-2.md"
ARMS, SEEDS, RATE = ("pg-is", "ppo"), (910, 911), 3.2e-3
LOOKS = (1, 4, 15)
"""Numbers of updates on the rollout after which whole distributions are compared."""

EDGES = (0.0, 0.001, 0.01, 0.1, 0.5, 1.0)
RARE = 0.1


class Observer:
    """Collects tokens of updates: who is masked, and how far the policy moved."""

    def __init__(self) -> None:
        self.columns: dict[str, list[torch.Tensor]] = defaultdict(list)

    @torch.no_grad()
    def __call__(self, number, update, policy, rollout, record, rows, out) -> None:
        """Records one update; see `synonym_training.Watch`."""
        if update == 0:
            self.before = copy.deepcopy(policy)
        if update not in LOOKS:
            return
        prompts, tokens = rollout.prompts[rows], rollout.tokens[rows]
        now = torch.log_softmax(_logits(policy, policy.head, prompts, tokens), dim=1)
        sampler = torch.log_softmax(_logits(self.before, rollout.head, prompts, tokens), dim=1)
        log_pi, log_mu = (x.gather(1, tokens.view(-1, 1)).view(tokens.shape) for x in (now, sampler))
        given = trustrl.RolloutTokens(
            behavior_logp=log_mu, advantage=record.advantage[rows], in_loss=torch.ones_like(tokens, dtype=torch.bool)
        )
        made = trustrl.PolicyTokens(logp=log_pi)
        columns = {
            "rollout": torch.full_like(tokens, number),
            "update": torch.full_like(tokens, update),
            "advantage": record.advantage[rows].unsqueeze(1).expand_as(tokens),
            "log_mu": log_mu,
            "log_pi": log_pi,
            "mismatch": (record.behavior_logp - record.proximal_logp)[rows].abs(),
            "tv": 0.5 * (now.exp() - sampler.exp()).abs().sum(1),
            "entropy": -(sampler.exp() * sampler).sum(1),
            "right": grammar().right(prompts, tokens),
        }
        for name in ("ppo", "dppo-binary-tv"):
            judged = trustrl.policy_loss(made, given, trustrl.preset(name), reduction=trustrl.TokenSum())
            columns[name] = ~judged.decision.keep
        for name, values in columns.items():
            self.columns[name].append(values.reshape(-1))

    def tokens(self) -> dict[str, np.ndarray]:
        """Returns the collected columns."""
        return {name: torch.cat(parts).numpy() for name, parts in self.columns.items()}


def _logits(policy, head, prompts, tokens) -> torch.Tensor:
    return torch.addmm(policy.bias, policy.at_answers(prompts, tokens), head.T)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def summary(d: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the numbers of the table for tokens with an advantage."""
    d = {name: values[d["advantage"] != 0] for name, values in d.items()}
    mu = np.exp(d["log_mu"])
    up = d["ppo"] & (d["advantage"] > 0)
    found: dict[str, Any] = {
        "tokens": len(mu),
        "masked": d["ppo"].mean(),
        "masked_dppo": d["dppo-binary-tv"].mean(),
        "positive": (d["advantage"] > 0).mean(),
        "upward": up.sum() / max(d["ppo"].sum(), 1),
        "rare": (mu < RARE).mean(),
        "rare_masked": _mean(mu[d["ppo"]] < RARE),
        "rare_upward": _mean(mu[up] < RARE),
        "median_upward": np.median(mu[up]) if up.any() else None,
        "binary_tv": np.abs(np.exp(d["log_pi"]) - mu).mean(),
        "surprise": -d["log_mu"].mean(),
    }
    for name in ("mismatch", "tv", "entropy"):
        found[name] = d[name].mean() if name in d else None
    if "right" in d:
        found["right_upward"] = _mean(d["right"][up])
        good = d["right"] & (d["advantage"] > 0)
        found["good"] = [int((good & (low <= mu) & (mu < high)).sum()) for low, high in pairwise([*EDGES[:-1], 1.0001])]
        found["good_masked"] = [
            int((good & d["ppo"] & (low <= mu) & (mu < high)).sum()) for low, high in pairwise([*EDGES[:-1], 1.0001])
        ]
    return {name: float(x) if isinstance(x, np.floating) else x for name, x in found.items()}


def smollm2(update: int) -> dict[str, np.ndarray]:
    """Returns SmolLM2's tokens after some updates without a region."""
    from smollm2_clipping import after
    from smollm2_tokens import load

    d = after(load(), update)
    return {
        **{name: d[name] for name in ("advantage", "log_mu", "log_pi", "ppo", "dppo-binary-tv")},
        "tv": d["tv_exact"],
    }


def measure() -> None:
    """Trains with and without PPO's clip in force and writes the summaries."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"rate": RATE, "seeds": SEEDS, "vocabulary": VOCABULARY, "places": PLACES, "worlds": {}}
    found |= about_start()
    for arm in ARMS:
        seeds, curves = [], []
        for seed in SEEDS:
            observer = Observer()
            curves.append(train(Run(arm, seed, RATE), observer)["accuracy"])
            seeds.append(observer.tokens())
        every = {name: np.concatenate([one[name] for one in seeds]) for name in seeds[0]}
        found["worlds"][arm] = {
            str(look): summary({name: values[every["update"] == look] for name, values in every.items()})
            for look in LOOKS
        }
        found["worlds"][arm]["accuracy"] = curves
    found["worlds"]["smollm2"] = {str(update): summary(smollm2(update)) for update in (1, 4, 16)}
    bf16 = json.loads((DATA / "smollm2-mismatch.json").read_text())["samplers"]["bf16"]["trainers"]["fp32"]
    for one in found["worlds"]["smollm2"].values():
        one["mismatch"] = bf16["mean"]  # of other answers, without updates
    counts = json.loads((DATA / "clipping.json").read_text())["seeds"].values()
    found["worlds"]["digits"] = {
        "upward": np.mean([one["upward"]["ppo"] / sum(one["stopped"]["ppo"]) for one in counts]),
        "rare_masked": np.mean([one["rare"]["ppo"] / sum(one["stopped"]["ppo"]) for one in counts]),
        "rare": np.mean([one["rare"]["tokens"] / sum(one["tokens"]) for one in counts]),
        "masked": np.mean([sum(one["stopped"]["ppo"]) / sum(one["tokens"]) for one in counts]),
        "masked_dppo": np.mean([sum(one["stopped"]["dppo-binary-tv"]) / sum(one["tokens"]) for one in counts]),
        **_steps_of_digits(),
    }
    FOUND.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


def about_start() -> dict[str, Any]:
    """Returns the start's accuracy, exact to 0.001, the error of a run's evaluation, and the corpus by rank."""
    rules = grammar()
    prompts = torch.cat([rules.train, rules.held_out]).repeat(800, 1)
    tokens = rules.corpus(prompts, torch.Generator().manual_seed(0))
    counts = torch.bincount(tokens.flatten(), minlength=VOCABULARY).sort(descending=True).values
    return {
        "start": evaluate(start(), answers=64),
        "error_in_runs": evaluate(start())[1],
        "frequency": {str(rank): int(counts[rank - 1]) / tokens.numel() for rank in (1, 10, 100, 1000, 4000)},
    }


def _steps_of_digits() -> dict[str, float]:
    import pyarrow.parquet as pq

    rows = [
        row
        for row in pq.read_table(DATA / "steps.parquet").to_pylist()
        if (row["setting"], row["arm"]) == ("both", "ppo")
    ]
    last = [row for row in rows if row["step"] % 16 == 0]
    return {
        "entropy": float(np.mean([row["entropy"] for row in rows])),
        "mismatch": float(np.mean([row["trustrl/mismatch_abs_mean"] for row in rows])),
        "binary_tv": float(np.mean([row["trustrl/gap_abs_mean"] for row in last])),
    }


ROWS = (
    ("tokens with an advantage that PPO masks", "masked", "{:.1%}"),
    ("that Binary DPPO (0.15) masks", "masked_dppo", "{:.1%}"),
    ("tokens with A > 0", "positive", "{:.1%}"),
    ("**of those PPO masks, A > 0**", "upward", "**{:.1%}**"),
    ("tokens with μ < 0.1", "rare", "{:.1%}"),
    ("of those PPO masks, μ < 0.1", "rare_masked", "{:.1%}"),
    ("of those PPO masks with A > 0, μ < 0.1", "rare_upward", "{:.1%}"),
    ("median μ of those PPO masks with A > 0", "median_upward", "{:.3f}"),
    ("mean exact TV from the sampler", "tv", "{:.3f}"),
    ("mean Binary TV", "binary_tv", "{:.4f}"),
    ("entropy, nats", "entropy", "{:.2f}"),
    ("mean −log μ of sampled tokens, nats", "surprise", "{:.2f}"),
    ("mean abs(log μ − log π'), nats", "mismatch", "{:.4f}"),
)


def page() -> None:
    """Writes the marked blocks of the page."""
    found = json.loads(FOUND.read_text())
    worlds = found["worlds"]
    columns = {
        "digits, PPO in force, all updates": worlds["digits"],
        "SmolLM2, no region, after 16": worlds["smollm2"]["16"],
        **{
            f"synonyms, {words}, after {look}": worlds[arm][str(look)]
            for arm, words in (("pg-is", "no region"), ("ppo", "PPO in force"))
            for look in (4, 15)
        },
    }
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for words, name, form in ROWS:
        cells = ["–" if one.get(name) is None else form.format(one[name]) for one in columns.values()]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    fill(PAGE, "table", "\n".join(lines))
    ours, smollm2_last = worlds["ppo"]["15"], worlds["smollm2"]["16"]
    fill(
        PAGE,
        "answer",
        f"With PPO's clip in force, **{ours['upward']:.1%}** of the tokens that it masks have A > 0 (digits "
        f"{worlds['digits']['upward']:.1%}, SmolLM2 {smollm2_last['upward']:.1%}). Their median μ is "
        f"{ours['median_upward']:.3f} (SmolLM2 {smollm2_last['median_upward']:.3f}). Of all tokens with an advantage, "
        f"{ours['positive']:.1%} have A > 0 (SmolLM2 {smollm2_last['positive']:.1%}): the reward here is binary, and "
        "most answers are wrong.",
    )
    good, masked = (np.array(worlds["ppo"]["15"][name]) for name in ("good", "good_masked"))
    lines = ["| μ of the token | right tokens with A > 0 | share of them | masked by PPO |", "|---|---|---|---|"]
    for (low, high), all_of, some in zip(pairwise(EDGES), good, masked, strict=True):
        lines.append(f"| {low:g} to {high:g} | {all_of:,} | {all_of / good.sum():.1%} | {some / max(all_of, 1):.1%} |")
    fill(PAGE, "good", "\n".join(lines))
    fill(PAGE, "start", _about_start(found))


def _about_start(found: dict[str, Any]) -> str:
    (accuracy, error), in_runs = found["start"], found["error_in_runs"]
    shares = ", ".join(f"{share:.1e} (rank {rank})" for rank, share in found["frequency"].items())
    ends = {arm: np.mean([curve[-1] for curve in found["worlds"][arm]["accuracy"]]) for arm in ARMS}
    return (
        f"Shares of single tokens in the corpus: {shares}. The start's held-out accuracy is {accuracy:.4f} (standard "
        f"error {error:.4f}). The evaluation in a run has a standard error of {in_runs:.4f} there, as if it had "
        f"counted the right ones among {accuracy * (1 - accuracy) / in_runs**2:,.0f} answers; all evaluations share "
        f"their random numbers. After 12 rollouts of 16 updates at a learning rate of {found['rate']:g} it is "
        f"{ends['pg-is']:.3f} without a region and {ends['ppo']:.3f} with PPO's published clip (mean of "
        f"{len(found['seeds'])} seeds, not tuned)."
    )


if __name__ == "__main__":
    command(__doc__ or "", measure=measure, page=page)

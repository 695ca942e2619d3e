"""Tokens with the library's verdicts, which a test compares with those of docs/concepts/clip-mask-project.md.

python scripts/explorer_points.py    writes tests/site/token-explorer.json
"""

import json
from itertools import cycle, product
from pathlib import Path

import torch

import trustrl
import trustrl.functional as F
from trustrl import regions

FILE = Path(__file__).parents[1] / "tests/site/token-explorer.json"
PROBABILITIES = (0.0002, 0.013, 0.31, 0.56, 0.88, 0.997)
SETTINGS = ((0.3, 0.05, 2.0), (0.15, 0.05, None), (0.07, 0.011, 5.0))
"""Bounds of Binary TV and Binary KL, and the cap."""


def points() -> list[dict]:
    """Returns every token with its settings, and the answer of each region."""
    pairs = [*product(PROBABILITIES, PROBABILITIES), (0.0001, 0.0003), (0.6, 0.76), (0.41, 0.52), (0.93, 0.71)]
    settings = cycle(SETTINGS)
    return [point(mu, pi, advantage, *next(settings)) for mu, pi in pairs for advantage in (1.3, -0.7)]


def point(mu: float, pi: float, advantage: float, delta: float, delta_kl: float, cap: float | None) -> dict:
    """Returns one token with the answer of each region, in the order of the page."""
    answers = [
        answer(regions.PPO(), F.ppo_loss, mu, pi, advantage),
        answer(
            regions.DPPO(regions.BinaryTV(max_increase=delta), max_ratio=cap),
            None if cap else lambda *token: F.dppo_loss(*token, max_increase=delta, max_decrease=delta),
            mu, pi, advantage,
        ),
        answer(
            regions.DPPO(regions.BinaryKL(max_increase=delta_kl), max_ratio=cap),
            None if cap else lambda *token: F.dppo_kl_loss(*token, max_increase=delta_kl, max_decrease=delta_kl),
            mu, pi, advantage,
        ),
    ]  # fmt: skip
    token = {"mu": mu, "pi": pi, "advantage": advantage, "delta": delta, "deltaKl": delta_kl, "cap": cap}
    return {**token, "answers": answers}


def answer(region, plain, mu: float, pi: float, advantage: float) -> list:
    """Returns verdict, weight and gradient of −loss by log π; the plain function has the same gradient if given."""
    logp = torch.tensor([[pi]], dtype=torch.float64).log().requires_grad_()
    behavior = torch.tensor([[mu]], dtype=torch.float64).log()
    signal, in_loss = torch.tensor([[advantage]], dtype=torch.float64), torch.tensor([[True]])
    rollout = trustrl.RolloutTokens(behavior_logp=behavior, advantage=signal, in_loss=in_loss)
    out = trustrl.policy_loss(trustrl.PolicyTokens(logp=logp), rollout, region, reduction=trustrl.TokenSum())
    (slope,) = torch.autograd.grad(out.loss, logp)
    if plain:
        (same,) = torch.autograd.grad(plain(logp, behavior, signal, in_loss).sum(), logp)
        torch.testing.assert_close(slope, same)
    return [bool(out.decision.keep), *(float(f"{number.item():.9g}") for number in (out.decision.weight, -slope))]


def text() -> str:
    """Returns the file, one token in a line."""
    return "[\n" + ",\n".join(json.dumps(one) for one in points()) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(text())

"""Variance and bias of score centering's gradient against plain policy gradient: SmolLM2-135M and the tiny model.

    OMP_NUM_THREADS=1 python studies/07-less-variance/score_centering.py    # needs transformers; half an hour
    python studies/07-less-variance/score_centering.py page                 # the page's table, from the stored figures

The prefixes are fixed. At each of them the sampled token is drawn again, `draws` times, with the advantages below,
and the loss is differentiated by the output head's inputs, one vector per position. All weights below the head
receive their gradient through these vectors. At fixed prefixes, the map from log-probs to these vectors is linear and
fixed, so the library's gradients by the log-probs are mapped exactly. The variance is the trace of the covariance
over draws, summed over positions. Expectations over tokens are exact sums over the vocabulary.

Symbols: N positions, V ids, D width of the head, K recorded ids.

Proofs of what the page states:

The expected gradient is 0 for an advantage that does not depend on the token. Sum over the tokens a ~ μ = b at one
prefix, with c = E_b[w s]. For any advantage the same sum is the covariance: the centering removes the product of the
two means, which pulls π towards μ, and nothing else.

    Σ_a μ(a)·A·(w(a)·s(a) − c) = A·(E_μ[w s] − c) = 0
    Cov_μ(A, w s) + E_μ[A]·(E_μ[w s] − c) = Cov_μ(A, w s)

One cell for the rest is the paper's tail, which models the sampler outside its top K as ρ·π(v), ρ = b_rest/π_rest.
With weights, the cell's weight is f(π_rest/b_rest).

    Σ_{v outside} ρ π(v)·s(v) = ρ·∇π_rest = b_rest·∇log π_rest = −ρ·Σ_{v in top K} π(v)·s(v)

The bias of a tail moves mass between ids outside the top K alone, and is 0 where μ is proportional to π there. With
w = 1 the expected gradient by the logits z is

    Σ_a μ(a)·∂ℓ(a)/∂z_v = 0                            v in the top K
                        = −A·(μ(v) − ρ π(v))           v outside;  these sum to 0
    Σ_v |bias_v| = 2·|A|·μ_rest·TV(μ restricted to the rest, π restricted to the rest) ≤ 2·|A|·μ_rest

With weights the difference outside is μ(v)·f(π/μ) − ρ·f(1/ρ)·π(v), which need not sum to 0.

The cells must not depend on the sampled token. A term that changes with a token is not a baseline: its covariance
with the advantage would enter the gradient. A sampled token outside the top K therefore belongs to the last cell.

The variance falls by as much as the drift is long, for an advantage that is independent of the token:

    Var[A·s] − Var[A·(s − E_μ[s])] = Var(A)·|E_μ[s]|²  ≥ 0
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from trustrl import regions

DOCS = Path(__file__).parents[2] / "docs"
DATA, PAGE = DOCS / "data/score-centering.json", DOCS / "results/score-centering.md"
KS = (1, 4, 16, 64, 128, 256)
SAMPLERS = {"equal": "equal weights", "fp8": "weights in fp8", "noisy": "weights with noise"}
ADVANTAGES = ("coin", "reward")
MODELS = {"smollm2-135m": "SmolLM2-135M", "tiny": "tiny model"}
SUBJECTS = ("how rain forms", "why leaves fall", "how bread is made", "what the moon does", "why people sleep")
SUMS = tuple(f"{a:02}+{b:02}=" for a, b in ((63, 11), (7, 45), (28, 39), (81, 96), (15, 70)))


@dataclass(frozen=True)
class Settings:
    """Settings of the run."""

    draws: int = 300
    """Resamplings of the tokens, the same for all estimates."""

    completions: int = 4
    """Completions for each of five prompts."""

    longest: int = 8
    """Tokens of a completion."""

    noise: float = 0.1
    """Standard deviation of the noise on a weight, relative to that of its matrix."""

    seed: int = 0


def run(settings: Settings) -> None:
    """Measures both models and writes the figures."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    began = time.monotonic()
    found = {name: measured(name, settings) for name in MODELS}
    about = {
        **asdict(settings),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "models": found,
    }
    DATA.write_text(json.dumps(about, indent=1) + "\n")
    page()


def measured(name: str, settings: Settings) -> dict:
    """Returns the figures of one model with each sampler."""
    import torch

    model, ids_BT, first = completions(name, settings)
    head_VD, pi_NV = distribution(model, ids_BT, first)
    out = {"positions": len(pi_NV), "vocabulary": len(head_VD), "width": head_VD.shape[1], "samplers": {}}
    for sampler in SAMPLERS:
        mu_NV = pi_NV
        if sampler != "equal":
            torch.manual_seed(settings.seed)
            mu_NV = distribution(perturbed(model, sampler, settings), ids_BT, first)[1]
        out["samplers"][sampler] = compared(head_VD, pi_NV, mu_NV, settings)
        print(name, sampler, flush=True)
    return out


def completions(name: str, settings: Settings) -> tuple:
    """Returns the model, sampled sequences (all of one length), and the first position that predicts a token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trustrl.world import models

    folder = models.path(name)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(settings.seed)
    rows = []
    for text in SUMS if name == "tiny" else [f"In short words, {one}:" for one in SUBJECTS]:
        prompt = tokenizer(text, return_tensors="pt").input_ids.repeat(settings.completions, 1)
        ended = {"eos_token_id": None, "pad_token_id": 0}  # every completion has the same length
        made = model.generate(prompt, do_sample=True, top_k=0, max_new_tokens=settings.longest, **ended)
        rows += [(row, prompt.shape[1] - 1) for row in made]
    return model, [row for row, _ in rows], [at for _, at in rows]


def distribution(model, ids_BT, first) -> tuple:
    """Returns the output head and the distributions at all positions, in float64."""
    import torch

    head_VD = model.get_output_embeddings().weight.detach().double()
    with torch.no_grad():
        hidden = [
            model.base_model(row[None, :-1]).last_hidden_state[0, at:] for row, at in zip(ids_BT, first, strict=True)
        ]
    return head_VD, torch.softmax(torch.cat(hidden).double() @ head_VD.T, -1)


def perturbed(model, sampler: str, settings: Settings):
    """Returns a copy of the model with matrices rounded to fp8 (e4m3, one scale per matrix), or with noise."""
    from copy import deepcopy

    import torch

    other = deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.ndim < 2:
                continue
            if sampler == "fp8":
                scale = weight.abs().max() / 448
                weight.copy_((weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale)
            else:
                weight.add_(settings.noise * weight.std() * torch.randn_like(weight))
    return other


@dataclass
class Estimate:
    """One estimator: −A·(w(a)·s(a) − c), with s(a) the score of token a by the head's inputs."""

    weight_NV: object
    center_ND: object
    """c."""

    gradient: object
    """Function of tokens and advantages (N) that returns the gradient (N, D)."""


def compared(head_VD, pi_NV, mu_NV, settings: Settings) -> dict:
    """Returns the figures of every estimator for one sampler."""
    import torch

    estimates = estimators(head_VD, pi_NV, mu_NV)
    generator = torch.Generator().manual_seed(settings.seed)
    paid_V = torch.rand(len(head_VD), generator=generator) < 0.5
    exact = {name: moments(one, head_VD, pi_NV, mu_NV, paid_V) for name, one in estimates.items()}
    target_ND = (pi_NV * paid_V) @ head_VD - (pi_NV * paid_V).sum(-1, keepdim=True) * (pi_NV @ head_VD)
    drift = exact["plain"]["drift_ND"].norm()
    squares = {kind: {name: [] for name in estimates} for kind in ADVANTAGES}
    for _ in range(settings.draws):
        token_N = torch.multinomial(mu_NV, 1, generator=generator).squeeze(-1)
        coin_N = torch.randint(0, 2, token_N.shape, generator=generator).double() * 2 - 1
        for kind, advantage_N in (("coin", coin_N), ("reward", paid_V[token_N].double())):
            for name, one in estimates.items():
                off = one.gradient(token_N, advantage_N) + exact[name][kind]["mean_ND"]
                squares[kind][name].append(off.square().sum().item())
    rows = {}
    for name in estimates:
        found = exact[name]
        rows[name] = {kind: ratio(squares[kind], exact, name, kind) for kind in ADVANTAGES}
        rows[name]["drift"] = None if drift < 1e-9 else (found["drift_ND"].norm() / drift).item()
        rows[name]["from_on_policy"] = ((found["reward"]["mean_ND"] - target_ND).norm() / target_ND.norm()).item()
    top = mu_NV.sort(-1, descending=True).values
    return {
        "tv": (0.5 * (mu_NV - pi_NV).abs().sum(-1)).mean().item(),
        "largest_drift": drift.item(),
        "tail": {str(k): (1 - top[:, :k].sum(-1)).mean().item() for k in KS},
        "rows": rows,
    }


def estimators(head_VD, pi_NV, mu_NV) -> dict[str, Estimate]:
    """Returns plain policy gradient, importance sampling, and score centering with each K and with a cap."""
    import torch

    one_NV, ratio_NV, none_ND = torch.ones_like(pi_NV), pi_NV / mu_NV, torch.zeros_like(pi_NV @ head_VD)
    mean_ND = pi_NV @ head_VD
    at = torch.arange(len(pi_NV))

    def closed_form(weight_NV, center_ND):
        def gradient(token_N, advantage_N):
            score_ND = head_VD[token_N] - mean_ND
            return -advantage_N[:, None] * (weight_NV[at, token_N][:, None] * score_ND - center_ND)

        return Estimate(weight_NV, center_ND, gradient)

    def centered(region, weight_NV):
        gradient = by_library(region, head_VD, pi_NV, mu_NV)
        token_N = mu_NV.argmax(-1)
        score_ND = weight_NV[at, token_N][:, None] * (head_VD[token_N] - mean_ND)
        return Estimate(weight_NV, gradient(token_N, torch.ones_like(at, dtype=torch.float64)) + score_ND, gradient)

    found = {"plain": closed_form(one_NV, none_ND), "pg-is": closed_form(ratio_NV, none_ND)}
    for k in KS:
        found[f"K = {k}"] = centered(regions.ScoreCentering(k=k), one_NV)
    found["full"] = closed_form(one_NV, (mu_NV - pi_NV) @ head_VD)
    capped = regions.ScoreCentering(weight=regions.TIS(max_ratio=2.0))
    found["K = 128, min(r, 2)"] = centered(capped, ratio_NV.clamp(max=2.0))
    check(found["full"], head_VD, pi_NV, mu_NV)
    return found


def check(full: Estimate, head_VD, pi_NV, mu_NV) -> None:
    """Raises if the closed form of full centering is not the library's gradient."""
    import torch

    import trustrl

    token_N, advantage_N = mu_NV.argmin(-1), torch.linspace(-1, 1, len(mu_NV), dtype=torch.float64)
    logp_NV = pi_NV.log().requires_grad_()
    rollout = recorded(mu_NV, token_N, advantage_N)
    rollout = replace(rollout, full=trustrl.FullVocabulary(mu_NV.log(), "behavior"))
    policy = trustrl.PolicyTokens(logp=logp_NV.gather(-1, token_N[:, None]).squeeze(-1), full_logp=logp_NV)
    region = regions.ScoreCentering(support="full")
    trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum()).loss.backward()
    found = logp_NV.grad @ head_VD - logp_NV.grad.sum(-1, keepdim=True) * (pi_NV @ head_VD)
    torch.testing.assert_close(found, full.gradient(token_N, advantage_N), rtol=1e-9, atol=1e-9)


def recorded(mu_NV, token_N, advantage_N):
    """Returns the rollout's side without a support."""
    import torch

    import trustrl

    return trustrl.RolloutTokens(
        behavior_logp=mu_NV.gather(-1, token_N[:, None]).squeeze(-1).log(),
        advantage=advantage_N,
        in_loss=torch.ones_like(token_N, dtype=torch.bool),
        token_ids=token_N,
    )


def by_library(region, head_VD, pi_NV, mu_NV):
    """Returns the gradient by the head's inputs: `policy_loss` by the log-probs, and the head's exact linear map."""
    import torch

    import trustrl

    ids_NK = mu_NV.topk(region.k, -1).indices
    mu_NK, pi_NK = mu_NV.gather(-1, ids_NK).log(), pi_NV.gather(-1, ids_NK).log()
    rows_NKD, mean_ND = head_VD[ids_NK], pi_NV @ head_VD

    def gradient(token_N, advantage_N):
        logp_N = pi_NV.gather(-1, token_N[:, None]).squeeze(-1).log().requires_grad_()
        topk_NK = pi_NK.clone().requires_grad_()
        topk = trustrl.TopK(ids_NK, mu_NK, "behavior")
        rollout = replace(recorded(mu_NV, token_N, advantage_N), topk=topk)
        policy = trustrl.PolicyTokens(logp=logp_N, topk_logp=topk_NK)
        trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum()).loss.backward()
        total_N1 = (logp_N.grad + topk_NK.grad.sum(-1))[:, None]
        on_ids_ND = torch.bmm(topk_NK.grad[:, None], rows_NKD).squeeze(1)
        return logp_N.grad[:, None] * head_VD[token_N] + on_ids_ND - total_N1 * mean_ND

    return gradient


def moments(one: Estimate, head_VD, pi_NV, mu_NV, paid_V) -> dict:
    """Returns exact expectations over the tokens: the drift at A = 1, and mean and variance for both advantages."""
    mean_ND, w_NV, c_ND = pi_NV @ head_VD, one.weight_NV, one.center_ND

    def expected(p_NV):
        weighted = p_NV * w_NV
        score_ND = weighted @ head_VD - weighted.sum(-1, keepdim=True) * mean_ND
        return score_ND - p_NV.sum(-1, keepdim=True) * c_ND

    norm_V, along_NV, across_NV = head_VD.square().sum(-1), mean_ND @ head_VD.T, c_ND @ head_VD.T
    size_NV = w_NV.square() * (norm_V - 2 * along_NV + mean_ND.square().sum(-1, keepdim=True))
    size_NV = (
        size_NV - 2 * w_NV * (across_NV - (mean_ND * c_ND).sum(-1, keepdim=True)) + c_ND.square().sum(-1, keepdim=True)
    )
    drift_ND, paid_ND = expected(mu_NV), expected(mu_NV * paid_V)
    return {
        "drift_ND": drift_ND,
        "coin": {"mean_ND": 0 * drift_ND, "variance": (mu_NV * size_NV).sum().item()},
        "reward": {
            "mean_ND": paid_ND,
            "variance": ((mu_NV * paid_V * size_NV).sum() - paid_ND.square().sum()).item(),
        },
    }


def ratio(squares: dict, exact: dict, name: str, kind: str) -> dict:
    """Returns the variance relative to plain policy gradient: measured, its standard error, and exact."""
    import numpy as np

    own, plain = (np.array(squares[x]) for x in (name, "plain"))
    value = own.mean() / plain.mean()
    error = (own - value * plain).std(ddof=1) / plain.mean() / len(own) ** 0.5
    return {
        "variance": float(value),
        "error": float(error),
        "exact": exact[name][kind]["variance"] / exact["plain"][kind]["variance"],
    }


def page() -> None:
    """Writes the table of the page from the stored figures."""
    data = json.loads(DATA.read_text())
    lines = []
    for model, label in MODELS.items():
        of = data["models"][model]
        for sampler in ("fp8", "noisy"):
            found = of["samplers"][sampler]
            head = f"{label}, {SAMPLERS[sampler]}: mean TV {found['tv']:.3f}"
            lines += [
                f"| {head} | variance, coin | variance, reward | drift left | from on-policy |",
                "|---|---|---|---|---|",
            ]
            for name, row in found["rows"].items():
                cells = [f"{row[kind]['variance']:.4f} ± {row[kind]['error']:.4f}" for kind in ADVANTAGES]
                cells = [words(name, found), *cells, percent(row["drift"]), percent(row["from_on_policy"])]
                lines.append(f"| {' | '.join(cells)} |")
            lines.append("")
    text = PAGE.read_text()
    begin = "<!-- figures: begin (python studies/07-less-variance/score_centering.py) -->\n"
    end = "<!-- figures: end -->"
    before, rest = text.split(begin)
    PAGE.write_text(before + begin + "\n".join(lines).rstrip() + "\n" + end + rest.split(end)[1])


def words(name: str, found: dict) -> str:
    if name in ("plain", "pg-is"):
        return {"plain": "plain policy gradient", "pg-is": "`pg-is`"}[name]
    k = name.removeprefix("K = ").split(",")[0]
    tail = f" (tail {percent(found['tail'][k])})" if name == f"K = {k}" else ""
    return f"centered, {name.replace('full', 'whole vocabulary')}{tail}"


def percent(share: float) -> str:
    return f"{share:.3%}" if 1e-5 < share < 0.01 else f"{share:.1%}" if share > 1e-5 else "0"


if __name__ == "__main__":
    page() if sys.argv[1:] == ["page"] else run(Settings())

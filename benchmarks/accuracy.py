"""Error of log-probs from bf16 products on a real model: head repair compared with plain bf16 and float32 products.

    nox -s real_model

Uses SmolLM2-135M's hidden states on prose and on its own samples, rounded to bf16 together with its head. The reference
is the float64 product of the same rounded numbers. Given ids are the K most probable ids of a slightly moved policy, as
an anchor's would be. `bound` is the `logp_error` that the pass returns.
"""

import smollm2
import torch
from torch import Tensor

import trustrl

IDS = (0, 16, 64, 256)


def rows(data: dict[str, Tensor], corpus: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns hidden and head in bf16, the sampled tokens, and the moved policy's ids by falling probability."""
    hidden, head = data[f"{corpus}_hidden"].bfloat16(), data["head"].bfloat16()
    moved = data[f"{corpus}_moved_hidden"] @ data["moved_head"].T
    return hidden, head, data[f"{corpus}_token_ids"], moved.topk(max(IDS), dim=-1).indices


def errors(data: dict[str, Tensor], corpus: str) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Returns, for each K, the sampled token's |log-prob error|, the bound, and the mass outside the given ids."""
    hidden, head, token, ids = rows(data, corpus)
    truth = torch.log_softmax(hidden.double() @ head.double().T, -1).gather(-1, token[:, None])[:, 0]
    found = {}
    for k in IDS:
        out = trustrl.token_logprobs(hidden, head, token, gather_ids=ids[:, :k])
        found[k] = (out.logp.double() - truth).abs(), out.logp_error.double(), out.tail_logp.double().exp()
    return found


def main() -> None:
    data = smollm2.load()
    print("| corpus | path | mean error | 99 % | max | mean bound | max bound | bound / error, smallest |")
    print("|---|---|---|---|---|---|---|---|")
    for corpus in ("text", "samples"):
        hidden, head, token, _ = rows(data, corpus)
        truth = torch.log_softmax(hidden.double() @ head.double().T, -1).gather(-1, token[:, None])[:, 0]
        plain = torch.log_softmax((hidden @ head.T).float(), -1).gather(-1, token[:, None])[:, 0]
        show(corpus, "plain bf16", (plain.double() - truth).abs(), None)
        for k, (error, bound, _) in errors(data, corpus).items():
            show(corpus, f"head repair, K = {k}", error, bound)
        wide = trustrl.token_logprobs(hidden, head, token, product_dtype=torch.float32)
        show(corpus, "float32 products", (wide.logp.double() - truth).abs(), wide.logp_error.double())


def show(corpus: str, path: str, error: Tensor, bound: Tensor | None) -> None:
    figures = [error.mean(), error.quantile(0.99), error.max()]
    figures += [] if bound is None else [bound.mean(), bound.max()]
    cells = [f"{float(x):.1e}" for x in figures] + ["–"] * (5 - len(figures))
    tightest = "–" if bound is None else f"{float((bound / error.clamp(min=1e-12)).min()):.1f}"
    print(f"| {corpus} | {path} | {' | '.join(cells)} | {tightest} |")


if __name__ == "__main__":
    main()

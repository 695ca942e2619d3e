"""Error of log-probs from bf16 products on a real model: head repair compared with plain bf16 and float32 products.

    nox -s real_model
    python benchmarks/accuracy.py --gradients     # the second table too

Uses SmolLM2-135M's hidden states on prose and on its own samples, rounded to bf16 together with its head. The reference
is the float64 product of the same rounded numbers. Given ids are the K most probable ids of a slightly moved policy, as
an anchor's would be. `bound` is the `logp_error` that the pass returns. The second table has the relative errors of the
gradients, for products that the pass keeps and for products that it makes again, on as many tokens as the hidden size.
"""

import sys
from unittest import mock

import smollm2
import torch
from torch import Tensor

import trustrl
from trustrl.kernels import vocab_pass

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


def gradient_errors(data: dict[str, Tensor], corpus: str, dtype: torch.dtype, *, kept: bool) -> tuple[float, float]:
    """Returns the relative errors of the gradients of hidden states and head, by norms, against float64."""
    hidden, head, token, ids = (x[: data["head"].shape[1]] if i != 1 else x for i, x in enumerate(rows(data, corpus)))
    ids, g = ids[:, :64], torch.Generator().manual_seed(0)
    weight = torch.randn(len(token), generator=g)

    def loss(logp: Tensor, given: Tensor, tail: Tensor, entropy: Tensor) -> Tensor:
        terms = logp + 0.01 * given.sum(-1) + 0.1 * tail + 0.01 * entropy
        return (weight.to(terms.dtype) * terms).sum()

    wide = [x.double().requires_grad_() for x in (hidden, head)]
    logp = torch.log_softmax(wide[0] @ wide[1].T, -1)
    known = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, ids, True).scatter(-1, token[:, None], True)
    tail, entropy = logp.masked_fill(known, -torch.inf).logsumexp(-1), -(logp.exp() * logp).sum(-1)
    loss(logp.gather(-1, token[:, None])[:, 0], logp.gather(-1, ids), tail, entropy).backward()
    given = [x.to(dtype).requires_grad_() for x in (hidden, head)]
    room = vocab_pass.room_for if kept else lambda *_: 0
    with mock.patch.object(vocab_pass, "room_for", side_effect=room) as asked:
        out = trustrl.token_logprobs(*given, token, gather_ids=ids, entropy=True)
    if not asked.called:
        raise RuntimeError("token_logprobs did not ask for room for its products. Update this benchmark.")
    loss(out.logp, out.gathered_logp, out.tail_logp, out.entropy).backward()
    found = ((x.grad.double() - y.grad).norm() / y.grad.norm() for x, y in zip(given, wide, strict=True))
    return tuple(map(float, found))


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
    if sys.argv[1:] == ["--gradients"]:
        show_gradients(data)


def show_gradients(data: dict[str, Tensor]) -> None:
    print("\n| corpus | products | logits | d_hidden error | d_head error |\n|---|---|---|---|---|")
    for corpus in ("text", "samples"):
        for dtype in (torch.bfloat16, torch.float32):
            for kept in (True, False):
                found = gradient_errors(data, corpus, dtype, kept=kept)
                name, how = str(dtype).removeprefix("torch."), "kept" if kept else "made again"
                print(f"| {corpus} | {name} | {how} | " + " | ".join(f"{x:.1e}" for x in found) + " |")


def show(corpus: str, path: str, error: Tensor, bound: Tensor | None) -> None:
    figures = [error.mean(), error.quantile(0.99), error.max()]
    figures += [] if bound is None else [bound.mean(), bound.max()]
    cells = [f"{float(x):.1e}" for x in figures] + ["–"] * (5 - len(figures))
    tightest = "–" if bound is None else f"{float((bound / error.clamp(min=1e-12)).min()):.1f}"
    print(f"| {corpus} | {path} | {' | '.join(cells)} | {tightest} |")


if __name__ == "__main__":
    main()

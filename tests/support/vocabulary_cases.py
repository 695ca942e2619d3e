"""Calls of `token_logprobs` whose waits are counted: every output, and the ways in which gradients are made."""

import torch

import trustrl
from trustrl.core.token_logprobs import AnchorStates

NUM_TOKENS, HIDDEN, VOCABULARY, K = 12, 16, 300, 5

CASES = {
    "sampled token": {},
    "given ids": {"gather_ids": True},
    "given ids and entropy": {"gather_ids": True, "entropy": True},
    "detached entropy": {"gather_ids": True, "entropy": "detached"},
    "top-K": {"top_k": K},
    "divergences": {"gather_ids": True, "against": True},
    "divergences, log-sum-exp recorded": {"gather_ids": True, "against": True, "logsumexp": True},
    "ignored rows": {"gather_ids": True, "ignored": True},
    "one temperature per token": {"gather_ids": True, "temperature": True},
}


def call(name, *, device="cpu", dtype=torch.float32, head_gradient=True, tiles=2, impl="chunked"):
    """Prepares a case. Returns the call, its hidden states and its head."""
    asked = dict(CASES[name])
    hidden = torch.randn(NUM_TOKENS, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    head = torch.randn(VOCABULARY, HIDDEN, device=device, dtype=dtype, requires_grad=head_gradient)
    ids = torch.randint(0, VOCABULARY, (NUM_TOKENS, K + 1), device=device)
    token_ids = ids[:, 0]
    more = {"top_k": asked.get("top_k", 0), "entropy": asked.get("entropy", False), "impl": impl}
    if "ignored" in asked:
        token_ids = torch.where(torch.arange(NUM_TOKENS, device=device) % 3 == 0, -1, token_ids)
    if "gather_ids" in asked:
        more["gather_ids"] = ids[:, 1:]
    if "temperature" in asked:
        more["temperature"] = torch.rand(NUM_TOKENS, device=device) + 0.5
    if "against" in asked:
        logsumexp = torch.randn(NUM_TOKENS, device=device) if "logsumexp" in asked else None
        more["against"] = AnchorStates(hidden.detach() + 0.1, head.detach(), logsumexp=logsumexp)
    blocks = {"block_rows": NUM_TOKENS, "block_vocab": VOCABULARY // tiles}

    def run():
        return trustrl.token_logprobs(hidden, head, token_ids, **more, **blocks)

    return run, hidden, head


def loss_of(out):
    """Returns a number that depends on every output with a gradient."""
    return sum(x.float().sum() for x in out if isinstance(x, torch.Tensor) and x.requires_grad)

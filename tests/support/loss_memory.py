"""Peak memory of a region's loss on packed tokens: `python -m support.loss_memory 40704` prints a table."""

import sys

import torch

import trustrl
from support.live_bytes import LiveBytes
from trustrl import PolicyTokens, RolloutTokens, TopK

REGIONS = {name: trustrl.preset(name, anchor="proximal", k=64) for name in ("dppo-topk-tv", "dppo-topk-kl", "troll")}


def loss_peak(region, num_tokens):
    """Peak bytes that the loss of so many tokens adds to its inputs, forward, sums and backward."""
    make, k = torch.Generator().manual_seed(0), region.needs().topk
    old = torch.randn(num_tokens, 2 * k, generator=make)
    new = old + 0.1 * torch.randn(old.shape, generator=make)
    old, new = old.log_softmax(-1), new.log_softmax(-1)
    # The sampled token is one of the K ids, so that the tail is the rest of the ids.
    policy = PolicyTokens(
        logp=new[:, 0].clone().requires_grad_(),
        topk_logp=new[:, :k].clone().requires_grad_(),
        tail_logp=new[:, k:].logsumexp(-1).requires_grad_(),
        entropy=torch.zeros(num_tokens),
    )
    rollout = RolloutTokens(
        advantage=torch.randn(num_tokens, generator=make),
        in_loss=torch.ones(num_tokens, dtype=torch.bool),
        token_ids=torch.zeros(num_tokens, dtype=torch.long),
        proximal_logp=old[:, 0].clone(),
        topk=TopK(
            torch.arange(k).expand(num_tokens, k).contiguous(),
            old[:, :k].clone(),
            of="proximal",
            tail_logp=old[:, k:].logsumexp(-1),
        ),
    )
    with LiveBytes() as live:
        out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenMean(num_tokens=num_tokens))
        trustrl.rates(out.sums)
        out.loss.backward()
    return live.peak


if __name__ == "__main__":
    for name, region in REGIONS.items():
        print(f"{name:14}{loss_peak(region, int(sys.argv[1])) / 1e6:8.1f} MB", flush=True)

"""Host time of a loss: what the Python process needs to launch the kernels of one micro-batch.

    python benchmarks/host_time.py

Eight sequences of eight tokens, so that the arithmetic itself takes almost no time: what is left is Python and torch's
dispatch of each operation, which a GPU run pays too, on its host. Forward and backward with all sums; medians of the
CPU time of one thread. The kernels are counted by tests/support/kernel_counts.py.
"""

import json
import statistics
import time
from pathlib import Path

import torch

import trustrl

PRESETS = ("ppo", "dppo-binary-tv", "dppo-topk-tv", "troll")
ROWS, WIDTH, K, CALLS = 8, 8, 64, 300
COUNTS = Path(__file__).parent.parent / "tests" / "contracts" / "kernel_counts.json"


def plain_ppo(logp, rollout):
    ratio = torch.exp(logp - rollout.behavior_logp)
    return -torch.minimum(ratio * rollout.advantage, ratio.clamp(0.8, 1.28) * rollout.advantage).mean()


def call_for(name):
    """Returns a call of one loss, its sums and its backward pass."""
    region = trustrl.preset(name or "ppo")
    needs, g = region.needs(), torch.Generator().manual_seed(0)
    cells = torch.log_softmax(2.5 * torch.randn(ROWS, WIDTH, K + 2, generator=g), -1)
    ids = torch.arange(K).expand(ROWS, WIDTH, K).contiguous()
    rollout = trustrl.RolloutTokens(
        behavior_logp=cells[..., 0], proximal_logp=cells[..., 0], advantage=torch.randn(ROWS, WIDTH, generator=g),
        in_loss=torch.ones(ROWS, WIDTH, dtype=torch.bool), token_ids=torch.full((ROWS, WIDTH), K),
        topk=trustrl.TopK(ids[..., : needs.topk], cells[..., 1 : needs.topk + 1], needs.anchor) if needs.topk else None,
    )  # fmt: skip
    moved = torch.log_softmax(cells + 0.05 * torch.randn(cells.shape, generator=g), -1)
    reduction = trustrl.TokenMean(num_tokens=ROWS * WIDTH)

    def once():
        logp = moved[..., 0].clone().requires_grad_()
        if name is None:
            plain_ppo(logp, rollout).backward()
            return
        columns = moved[..., 1 : needs.topk + 1].clone().requires_grad_() if needs.topk else None
        policy = trustrl.PolicyTokens(logp=logp, topk_logp=columns)
        out = trustrl.policy_loss(policy, rollout, region, reduction=reduction)
        out.sums  # noqa: B018  made on first access
        out.loss.backward()

    return once


def main() -> None:
    torch.set_num_threads(1)
    kernels = json.loads(COUNTS.read_text())
    calls = {name: call_for(name) for name in (None, *PRESETS)}
    times = {name: [] for name in calls}
    for turn in range(CALLS + 20):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if turn >= 20:
                times[name].append(time.process_time() - start)
    print(f"| loss | ms on the host | kernels | µs per kernel |\n|---|---|---|---|\n| plain PPO | "
          f"{1e3 * statistics.median(times[None]):.2f} | – | – |")  # fmt: skip
    for name in PRESETS:
        seconds = statistics.median(times[name])
        count = kernels[name]["kernels"]
        per_kernel = "–" if name == "troll" else f"{1e6 * seconds / count:.1f}"  # a CPU takes a shorter path
        print(f"| `{name}` | {1e3 * seconds:.2f} | {count} | {per_kernel} |")


if __name__ == "__main__":
    main()

"""Cost of region, loss and diagnostics relative to a plain PPO-clip loss, forward and backward.

    nox -s cost
    nox -s cost -- --rounds 21 --threads 2

65,536 tokens (64 sequences of 1,024, the last eighth of each outside the loss), K = 20. Paths alternate in rounds, and
the printed table shows medians. Compare ratios, not milliseconds: machines differ and are shared.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch

import trustrl

ROWS, WIDTH, K = 64, 1024, 20
TOKENS = ROWS * WIDTH


def plain_ppo_clip(logp, behavior, advantage, in_loss, count):
    """Computes the loss as trainers write it, without metrics."""
    ratio = torch.exp(logp - behavior)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return (loss * in_loss).sum() / count


def ppo_clip_with_metrics(logp, behavior, advantage, in_loss, count):
    """Computes the same loss and the three metrics that trainers log with it."""
    ratio = torch.exp(logp - behavior)
    free, held = -ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage
    loss = (torch.maximum(free, held) * in_loss).sum() / count
    with torch.no_grad():
        clipped = ((held > free) * in_loss).sum() / count
        kl = ((behavior - logp) * in_loss).sum() / count
        mean = (ratio * in_loss).sum() / count
    return loss, clipped, kl, mean


class Batch:
    """One batch of tokens with a top-K record; about one token in a hundred has left TROLL's ball."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        cells = torch.log_softmax(2.5 * torch.randn(TOKENS, K + 2, generator=g), -1)
        size = 0.05 * torch.exp(torch.randn(TOKENS, 1, generator=g))  # most tokens move a little, a few a lot
        moved = torch.log_softmax(cells + size * torch.randn(TOKENS, K + 2, generator=g), -1)

        def shaped(x):
            return x.reshape(ROWS, WIDTH, *x.shape[1:]).contiguous()

        self.behavior, self.logp = shaped(cells[:, 0]), shaped(moved[:, 0])
        self.topk_logp, self.policy_topk = shaped(cells[:, 1 : K + 1]), shaped(moved[:, 1 : K + 1])
        self.ids = shaped(torch.randint(0, 100_000, (TOKENS, K), generator=g) + torch.arange(K) * 100_000)
        self.tokens = torch.full((ROWS, WIDTH), 10_000_000)  # outside the recorded ids
        self.advantage = torch.randn(ROWS, WIDTH, generator=g)
        self.in_loss = (torch.arange(WIDTH) < WIDTH - WIDTH // 8).expand(ROWS, WIDTH).contiguous()
        self.count = int(self.in_loss.sum())

    def ours(self, region: trustrl.Region, compiled: bool, measured: bool) -> Callable[[], object]:
        """Returns a call of forward and backward under a region. The record is built once, as at rollout time."""
        needs = region.needs()
        topk = trustrl.TopK(self.ids, self.topk_logp, needs.anchor) if needs.topk else None
        rollout = trustrl.RolloutTokens(
            behavior_logp=self.behavior,
            proximal_logp=self.behavior if "proximal" in needs.anchors else None,
            advantage=self.advantage,
            in_loss=self.in_loss,
            token_ids=self.tokens,
            topk=topk,
        )
        reduction = trustrl.TokenMean(num_tokens=self.count)

        def loss(logp, topk_logp):
            policy = trustrl.PolicyTokens(logp=logp, topk_logp=topk_logp)
            out = trustrl.policy_loss(policy, rollout, region, reduction=reduction)
            return out.loss, out.sums.added if measured else {}

        call = torch.compile(loss, fullgraph=True) if compiled else loss

        def once():
            logp = self.logp.clone().requires_grad_()
            topk_logp = self.policy_topk.clone().requires_grad_() if topk is not None else None
            value, _ = call(logp, topk_logp)
            value.backward()

        return once

    def plain(self, function: Callable, compiled: bool) -> Callable[[], object]:
        """Returns a call of forward and backward of a plain loss on the same tokens."""
        call = torch.compile(function) if compiled else function

        def once():
            logp = self.logp.clone().requires_grad_()
            found = call(logp, self.behavior, self.advantage, self.in_loss, self.count)
            (found[0] if isinstance(found, tuple) else found).backward()

        return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="number of alternating rounds; the table shows medians")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batch = Batch()
    regions = {
        "DPPO Binary TV": trustrl.preset("dppo-binary-tv"),
        "DPPO Binary KL": trustrl.preset("dppo-binary-kl"),
        "DPPO Top-20 TV": trustrl.preset("dppo-topk-tv"),
        "DPPO Top-20 KL": trustrl.preset("dppo-topk-kl"),
        "TROLL, 20 ids": trustrl.TROLL(k=K),
    }
    work: dict[str, Callable[[], object]] = {}
    for compiled in (False, True):
        suffix = ", compiled" if compiled else ""
        work[f"PPO-clip, plain{suffix}"] = batch.plain(plain_ppo_clip, compiled)
        work[f"PPO-clip, three metrics{suffix}"] = batch.plain(ppo_clip_with_metrics, compiled)
        for name, region in regions.items():
            if not (compiled and region.kind == "troll"):  # its solver exits early on a CPU; a graph cannot
                work[f"{name}{suffix}"] = batch.ours(region, compiled, measured=True)
                if not compiled:
                    work[f"{name}, loss alone"] = batch.ours(region, compiled, measured=False)
    work["TopK record, once per batch"] = lambda: trustrl.TopK(batch.ids, batch.topk_logp)

    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(args.rounds + 2):
        print(f"\rround {turn + 1} of {args.rounds + 2}", end="", file=sys.stderr)
        for name, call in work.items():
            start = time.perf_counter()
            call()
            if turn >= 2:  # the first rounds compile and warm up
                times[name].append(time.perf_counter() - start)
    print(file=sys.stderr)

    median = {name: statistics.median(values) for name, values in times.items()}
    base = median["PPO-clip, plain"]
    print(
        f"{TOKENS:,} tokens, K = {K}, {args.threads} thread(s), torch {torch.__version__}, {platform.machine()}, CPU\n"
    )
    print("| path | µs per 1,000 tokens | × plain PPO-clip | spread (quartiles) |")
    print("|---|---|---|---|")
    for name, value in median.items():
        low, _, high = statistics.quantiles(times[name], n=4)
        print(f"| {name} | {value / TOKENS * 1e9:.0f} | {value / base:.1f} | {low / value:.2f} to {high / value:.2f} |")


if __name__ == "__main__":
    main()

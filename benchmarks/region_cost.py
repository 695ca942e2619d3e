"""Cost of region, loss and diagnostics relative to another loss with its metrics, forward and backward.

    nox -s cost                                         # next to a plain PPO-clip loss with three metrics
    nox -s cost -- --rounds 21 --threads 2
    python benchmarks/region_cost.py --reference verl   # next to verl's own losses, where verl is installed
    python benchmarks/region_cost.py --reference trl    # next to TRL's own loss

65,536 tokens (64 sequences of 1,024, the last eighth of each outside the loss), K = 20 or 64. Paths alternate in
rounds, and the printed table shows medians of CPU time. Compare ratios, not times: machines differ and are shared.
TRL's loss is `GRPOTrainer._compute_loss` with the log-probs given, on one process.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

import trustrl

ROWS, WIDTH = 64, 1024
TOKENS = ROWS * WIDTH


def ppo_clip_with_metrics(logp, behavior, advantage, in_loss, count):
    """Computes the loss as trainers write it, and the three metrics that they log with it."""
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

    def __init__(self, k: int) -> None:
        g = torch.Generator().manual_seed(0)
        cells = torch.log_softmax(2.5 * torch.randn(TOKENS, k + 2, generator=g), -1)
        size = 0.05 * torch.exp(torch.randn(TOKENS, 1, generator=g))  # most tokens move a little, a few a lot
        moved = torch.log_softmax(cells + size * torch.randn(TOKENS, k + 2, generator=g), -1)

        def shaped(x):
            return x.reshape(ROWS, WIDTH, *x.shape[1:]).contiguous()

        self.behavior, self.logp = shaped(cells[:, 0]), shaped(moved[:, 0])
        self.topk_logp, self.policy_topk = shaped(cells[:, 1 : k + 1]), shaped(moved[:, 1 : k + 1])
        self.ids = shaped(torch.randint(0, 100_000, (TOKENS, k), generator=g) + torch.arange(k) * 100_000)
        self.tokens = torch.full((ROWS, WIDTH), 10_000_000)  # outside the recorded ids
        self.advantage = torch.randn(ROWS, WIDTH, generator=g)
        self.in_loss = (torch.arange(WIDTH) < WIDTH - WIDTH // 8).expand(ROWS, WIDTH).contiguous()
        self.count = int(self.in_loss.sum())

    def ours(self, region: trustrl.regions.Region, impl: str, measured: bool) -> Callable[[], object]:
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

        def once():
            topk_logp = self.policy_topk.detach().requires_grad_() if topk is not None else None
            policy = trustrl.PolicyTokens(logp=self.logp.detach().requires_grad_(), topk_logp=topk_logp)
            out = trustrl.policy_loss(policy, rollout, region, reduction=reduction, impl=impl)
            if measured:
                out.sums  # noqa: B018  made on first access
            out.loss.backward()

        return once

    def plain(self, function: Callable) -> Callable[[], object]:
        """Returns a call of forward and backward of a plain loss on the same tokens."""

        def once():
            logp = self.logp.detach().requires_grad_()
            function(logp, self.behavior, self.advantage, self.in_loss, self.count)[0].backward()

        return once


def verl_losses(batch: Batch) -> dict[str, Callable[[], object]]:
    """Returns calls of verl's own losses with their metrics."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    def call(mode: str) -> Callable[[], object]:
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(loss_mode=mode)
        )
        return batch.plain(
            lambda logp, behavior, advantage, in_loss, count: get_policy_loss_fn(mode)(
                old_log_prob=behavior, log_prob=logp, advantages=advantage, response_mask=in_loss, config=config
            )
        )

    return {f"verl's own, `{mode}`": call(mode) for mode in ("vanilla", "dppo_tv")}


def trl_losses(batch: Batch) -> dict[str, Callable[[], object]]:
    """Returns a call of TRL's own loss with its metrics."""
    from collections import defaultdict

    from trl import GRPOConfig, GRPOTrainer

    entropies = torch.ones_like(batch.logp)
    settings = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[])
    trainer = SimpleNamespace(
        args=settings, model=SimpleNamespace(training=True), use_vllm=False, beta=0.0, loss_type=settings.loss_type,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token",
        epsilon_low=settings.epsilon, epsilon_high=settings.epsilon, max_completion_length=WIDTH,
        vllm_importance_sampling_correction=False, aux_loss_enabled=False, _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1, _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
    )  # fmt: skip
    trainer.args.steps_per_generation = 1

    def loss(logp, behavior, advantage, in_loss, count):
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, entropies, None)
        mask = in_loss.long()
        inputs = {
            "prompt_ids": batch.tokens[:, :1], "prompt_mask": mask[:, :1], "completion_ids": batch.tokens,
            "completion_mask": mask, "advantages": advantage, "old_per_token_logps": behavior,
            "num_items_in_batch": torch.tensor(count),
        }  # fmt: skip
        return [GRPOTrainer._compute_loss(trainer, trainer.model, inputs)]

    return {f"TRL's own, `{settings.loss_type}`": batch.plain(loss)}


def clip_losses(batch: Batch) -> dict[str, Callable[[], object]]:
    """Returns a call of a plain PPO-clip loss."""
    return {"PPO-clip, three metrics": batch.plain(ppo_clip_with_metrics)}


REFERENCES = {"clip": clip_losses, "verl": verl_losses, "trl": trl_losses}


def work(reference: str) -> dict[str, Callable[[], object]]:
    """Returns the calls to time by name. The first is the unit."""
    batches = {k: Batch(k) for k in (20, 64)}
    regions = {
        "DPPO Binary TV": (20, trustrl.preset("dppo-binary-tv")),
        "DPPO Binary KL": (20, trustrl.preset("dppo-binary-kl")),
        "DPPO Top-20 TV": (20, trustrl.preset("dppo-topk-tv")),
        "DPPO Top-20 KL": (20, trustrl.preset("dppo-topk-kl")),
        "DPPO Top-64 TV": (64, trustrl.regions.DPPO(trustrl.regions.TopKTV(k=64))),
        "DPPO Top-64 KL": (64, trustrl.regions.DPPO(trustrl.regions.TopKKL(k=64))),
        "TROLL, 20 ids": (20, trustrl.regions.TROLL(k=20)),
        "TROLL, 64 ids": (64, trustrl.regions.TROLL(k=64)),
    }
    calls = REFERENCES[reference](batches[20])
    for name, (k, region) in regions.items():
        for impl in ("eager", "compiled") if region.needs().topk else ("eager",):
            calls[f"{name} | {impl} | with sums"] = batches[k].ours(region, impl, measured=True)
            calls[f"{name} | {impl} | alone"] = batches[k].ours(region, impl, measured=False)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="number of alternating rounds; the table shows medians")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--reference", choices=list(REFERENCES), default="clip")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    calls = work(args.reference)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(args.rounds + 2):
        print(f"\rround {turn + 1} of {args.rounds + 2}", end="", file=sys.stderr)
        for name, call in calls.items():
            start = time.process_time()
            call()
            if turn >= 2:  # the first rounds compile and warm up
                times[name].append(time.process_time() - start)
    print(file=sys.stderr)
    unit_name = next(iter(calls))
    unit = times[unit_name]
    print(f"{TOKENS:,} tokens, {args.threads} thread(s), torch {torch.__version__}, {platform.machine()}, CPU\n")
    print(f"| path | steps | | µs per 1,000 tokens | × {unit_name} | spread (quartiles) |")
    print("|---|---|---|---|---|---|")
    for name, values in times.items():
        median = statistics.median(values)
        ratio = statistics.median(a / b for a, b in zip(values, unit, strict=True))
        low, _, high = statistics.quantiles(values, n=4)
        shown = name if " | " in name else f"{name} | its own | with its metrics"
        print(f"| {shown} | {median / TOKENS * 1e9:.0f} | {ratio:.1f} | {low / median:.2f} to {high / median:.2f} |")


if __name__ == "__main__":
    main()

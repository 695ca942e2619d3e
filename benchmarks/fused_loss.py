"""Time, products and memory of a DPPO loss from hidden states, at more tokens than the hidden size.

    python benchmarks/fused_loss.py                     # time: ratios to three bare products, medians of seven rounds
    python benchmarks/fused_loss.py --count             # products and peak memory, which other work cannot change

Time is CPU time on one thread, as a ratio to three bare products of the same round: blocks of at most 1,024 tokens,
tiles of 4,096 ids, each product in the faster of two layouts, outputs allocated beforehand. Paths alternate. "two
calls" is `token_logprobs` and `policy_loss`, "fused" is `policy_loss_from_hidden`, "plain" makes [tokens, vocabulary]
logits. "own" has a TROLL region that reads the policy at 64 given ids and at its own 64 most probable ones. All paths
use large pages.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large pages, as in vocabulary.py

import torch
from torch.utils.flop_counter import FlopCounterMode
from vocabulary_limit import cpu_seconds
from vocabulary_world import World, peak_memory, processor, say

import trustrl
from trustrl import regions
from trustrl.core.fused_loss import PolicyHead, policy_loss_from_hidden

ROWS, WIDTH, K = 1024, 4096, 64


class Step:
    """One loss with its gradients, by each path."""

    def __init__(self, rows: int, size: int, vocabulary: int) -> None:
        self.world = World(torch.float32, rows, vocabulary, size, K)
        plain = torch.full((rows,), -8.0)
        self.rollout = trustrl.RolloutTokens(
            token_ids=self.world.token, behavior_logp=plain, advantage=self.world.weight.sign(),
            in_loss=torch.ones(rows, dtype=torch.bool),
            topk=trustrl.TopK(self.world.ids, torch.full((rows, K), -12.0)),
        )  # fmt: skip
        self.reduction = trustrl.TokenMean(num_tokens=rows)

    def two_calls(self, region: regions.Region) -> None:
        """Runs `token_logprobs` and `policy_loss`."""
        hidden, head = self.world.leaves(frozen=False)
        needs = region.needs()
        out = trustrl.token_logprobs(
            hidden, head, self.world.token, gather_ids=self.world.ids if needs.topk else None,
            top_k=needs.topk if needs.fills else 0, entropy="detached",
        )  # fmt: skip
        own = None if out.topk is None else trustrl.TopK(out.topk.ids, out.topk.logp)
        policy = trustrl.PolicyTokens(
            logp=out.logp, topk_logp=out.gathered_logp, tail_logp=out.tail_logp, topk=own, entropy=out.entropy
        )
        trustrl.policy_loss(policy, self.rollout, region, reduction=self.reduction).loss.backward()

    def fused(self, region: regions.Region) -> None:
        """Runs `policy_loss_from_hidden`."""
        hidden, head = self.world.leaves(frozen=False)
        policy_loss_from_hidden(
            hidden, PolicyHead(head), self.rollout, region, reduction=self.reduction
        ).loss.backward()

    def plain(self) -> None:
        """Makes all logits."""
        hidden, head = self.world.leaves(frozen=False)
        logp = torch.log_softmax(hidden @ head.T, -1)
        policy = trustrl.PolicyTokens(logp=logp.gather(-1, self.world.token[:, None]).squeeze(-1))
        trustrl.policy_loss(policy, self.rollout, regions.DPPO(), reduction=self.reduction).loss.backward()

    def paths(self) -> dict[str, Callable[[], None]]:
        """Returns the paths by name."""
        binary, own = regions.DPPO(), regions.TROLL(k=K, anchor="behavior", rest="fill")
        return {
            "two calls": lambda: self.two_calls(binary),
            "fused": lambda: self.fused(binary),
            "two calls, own": lambda: self.two_calls(own),
            "fused, own": lambda: self.fused(own),
            "plain": self.plain,
        }


class Bare:
    """Three products over all tokens and ids, each in the faster of two layouts."""

    def __init__(self, world: World) -> None:
        self.hidden, self.head = world.hidden, world.head
        self.tile = torch.randn(min(ROWS, len(self.hidden)) * WIDTH)
        self.d_hidden, self.d_head = torch.empty_like(self.hidden), torch.empty_like(self.head)
        self.layouts = [min((False, True), key=lambda last: self._tried(last, p)) for p in range(3)]

    def _tried(self, last: bool, product: int) -> float:
        rows, columns = slice(0, min(ROWS, len(self.hidden))), slice(0, WIDTH)
        return min(cpu_seconds(lambda: self._one(product, last, rows, columns)) for _ in range(5))

    def _one(self, product: int, last: bool, rows: slice, columns: slice) -> None:
        hidden, head = self.hidden[rows], self.head[columns]
        flat = self.tile[: len(hidden) * len(head)]
        tile = flat.view(len(head), len(hidden)).T if last else flat.view(len(hidden), len(head))
        if product == 0 and last:
            torch.mm(head, hidden.T, out=tile.T)
        elif product == 0:
            torch.mm(hidden, head.T, out=tile)
        elif product == 1:
            torch.mm(tile.T, hidden, out=self.d_head[columns])
        else:
            torch.mm(tile, head, out=self.d_hidden[rows])

    def __call__(self) -> None:
        """Makes the products."""
        for start in range(0, len(self.hidden), ROWS):
            for column in range(0, len(self.head), WIDTH):
                for product, last in enumerate(self.layouts):
                    self._one(product, last, slice(start, start + ROWS), slice(column, column + WIDTH))


def times(step: Step, rounds: int) -> dict[str, list[float]]:
    bare, paths = Bare(step.world), step.paths()
    for call in paths.values():  # compiles
        call()
    ratios: dict[str, list[float]] = {name: [] for name in paths}
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds}")
        base = cpu_seconds(bare)
        for name, call in paths.items():
            ratios[name].append(cpu_seconds(call) / base)
    say("")
    return ratios


def counted(name: str, rows: int, size: int, vocabulary: int) -> str:
    step = Step(rows, size, vocabulary)
    call = step.paths()[name]
    with FlopCounterMode(display=False) as mode:
        call()
    peak = peak_memory(step.world, lambda _: call()) - step.world.head.nbytes
    return f"{mode.get_total_flops() / (2 * rows * vocabulary * size):.2f} | {peak / 2**20:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=16_384)
    parser.add_argument("--multiples", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one:
        print(counted(args.one, args.multiples[0] * args.size, args.size, args.vocabulary))
        return
    print(f"{processor()}. D = {args.size:,}, V = {args.vocabulary:,}, float32\n")
    print(
        "| N | path | products | MB beyond the head's gradient |"
        if args.count
        else "| N | path | × limit (quartiles) |"
    )
    print("|---|---|---|---|" if args.count else "|---|---|---|")
    for multiple in args.multiples:
        if args.count:
            for name in Step(1, 8, 64).paths():
                command = [sys.executable, __file__, "--one", name, "--multiples", str(multiple)]
                command += ["--size", str(args.size), "--vocabulary", str(args.vocabulary)]
                result = subprocess.run(command, capture_output=True, text=True, check=True)
                print(f"| {multiple} D | {name} | {result.stdout.strip()} |", flush=True)
            continue
        ratios = times(Step(multiple * args.size, args.size, args.vocabulary), args.rounds)
        for name, values in ratios.items():
            low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
            print(f"| {multiple} D | {name} | {statistics.median(values):.2f} ({low:.2f} to {high:.2f}) |", flush=True)


if __name__ == "__main__":
    main()

"""Time and memory of the pass over the vocabulary, compared with three bare products and with other libraries' heads.

    nox -s vocabulary                        # everything: prints tables, writes figures and numbers to docs
    nox -s vocabulary -- --only time --rounds 7
    nox -s vocabulary -- --only time --dtypes bf16 --vocabulary 18992     # where bf16 products are slow
    nox -s vocabulary -- --only time --dtypes bf16 --paths "three|trained head, everything"

Time is CPU time on one thread. Paths alternate in rounds; a ratio is computed within a round, and the table shows the
median. "Limit" is one forward and two backward products with preallocated outputs, each in the layout and chunking that
is fastest on this machine; see vocabulary_limit.py. Memory is the peak resident size above the inputs, with each path
in a separate process. The peers target GPUs and run fallbacks on a CPU; see peers.py.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from unittest import mock

# Large pages for large buffers, on every path. Without them, touching a new head gradient takes a tenth of the time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from research.loss_in_forward import loss_in_forward
from vocabulary_growth import growth, print_growth
from vocabulary_limit import Limits, converted, cpu_seconds, fastest_products
from vocabulary_world import NUMBERS, V, World, peak_memory, processor, say

import trustrl
from trustrl import regions
from trustrl.core.token_logprobs import AnchorStates
from trustrl.kernels import vocab_pass

ROWS = {torch.bfloat16: 1024, torch.float32: 512}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def ours(world: World, *, frozen: bool, entropy: bool | str, gather: bool = True, **settings: object) -> None:
    hidden, head = world.leaves(frozen)
    out = trustrl.token_logprobs(
        hidden, head, world.token, gather_ids=world.ids if gather else None, entropy=entropy, **settings
    )
    world.loss(out, entropy is True).backward()


def recomputing(world: World) -> None:
    """Runs the trained head with everything, without kept products: four products."""
    with mock.patch.object(vocab_pass, "room_for", return_value=0):
        ours(world, frozen=False, entropy=True)


def in_forward(world: World) -> None:
    hidden, head = world.leaves(frozen=False)
    loss_in_forward(
        hidden, head, world.token, lambda out, rows: world.loss(out, True, rows), gather_ids=world.ids, entropy=True
    ).backward()


def no_grad(world: World, **settings: object) -> None:
    with torch.no_grad():
        trustrl.token_logprobs(world.hidden, world.head, world.token, gather_ids=world.ids, entropy=True, **settings)


def exact_divergence(world: World) -> None:
    no_grad(world, against=AnchorStates(world.hidden, world.head))


def troll(world: World) -> None:
    """Computes TROLL's projection, loss and gradient on outputs like the pass's, without the pass itself."""
    rows, num_ids = world.ids.shape
    g = torch.Generator().manual_seed(2)
    anchor = torch.log_softmax(2.5 * torch.randn(rows, num_ids + 2, generator=g), -1)
    size = 0.05 * torch.exp(torch.randn(rows, 1, generator=g))  # most tokens move a little, a few a lot
    moved = torch.log_softmax(anchor + size * torch.randn(anchor.shape, generator=g), -1).requires_grad_()
    rollout = trustrl.RolloutTokens(
        behavior_logp=anchor[:, 0], proximal_logp=anchor[:, 0], advantage=world.weight, token_ids=world.token,
        in_loss=torch.ones(rows, dtype=torch.bool), topk=trustrl.TopK(world.ids, anchor[:, 1:-1], "proximal"),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=moved[:, 0], topk_logp=moved[:, 1:-1], tail_logp=moved[:, -1])
    region = regions.TROLL(k=num_ids)
    trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenMean(num_tokens=rows)).loss.backward()


OURS: dict[str, Callable[[World], None]] = {
    "trustrl, trained head, everything": lambda w: ours(w, frozen=False, entropy=True),
    "trustrl, trained head, everything, recomputing": recomputing,
    "trustrl, trained head, sampled token only": lambda w: ours(w, frozen=False, entropy=False, gather=False),
    "trustrl, frozen head, everything": lambda w: ours(w, frozen=True, entropy=True),
    "trustrl, frozen head, no entropy gradient": lambda w: ours(w, frozen=True, entropy="detached"),
    "trustrl, gradients in forward, everything": in_forward,
    "trustrl, TROLL's projection alone": troll,
    "trustrl, no gradient": no_grad,
    "trustrl, no gradient, own top-64": lambda w: no_grad(w, top_k=64),
    "trustrl, no gradient, exact TV and KL": exact_divergence,
}
BF16_ONLY = {
    "trustrl, trained head, products in float32": lambda w: ours(
        w, frozen=False, entropy=True, product_dtype=torch.float32
    )
}


def peers() -> dict[str, Callable[[World], None]]:
    from peers import PEERS

    def case(peer, entropy):
        def run(world: World) -> None:
            hidden, head = world.leaves(frozen=False)
            logp, spread = peer.function(hidden, head, world.token, entropy=entropy)
            total = (world.weight * logp).sum()
            if spread is not None:
                total = total + 0.01 * (world.weight * spread).sum()
            total.backward()

        return run

    found = {}
    for key, peer in PEERS.items():
        if key == "liger_cross_entropy":
            continue  # off Hopper GPUs it runs verl's formulas, which are already measured
        label = f"{peer.name} {peer.version}" if peer.package != "torch" else peer.name
        # Request all outputs that the peer offers; fewer outputs are cheaper.
        asked = "sampled token and entropy" if peer.gives_entropy else "sampled token"
        found[f"{label}, {asked}"] = case(peer, peer.gives_entropy)
    return found


def references(limits: Limits) -> dict[str, Callable[[World], None]]:
    """Returns two other ways to make three products, as paths."""
    return {
        "three products, one layout": lambda world: limits.one_layout(),
        "three products in float32": converted,
    }


def cases(dtype: torch.dtype) -> dict[str, Callable[[World], None]]:
    if dtype == torch.bfloat16:
        return {**peers(), **OURS, **BF16_ONLY}
    # A round in float32 takes minutes, so measure only the paths that answer the question.
    others = {name: call for name, call in peers().items() if "compile" not in name and "selective" not in name}
    return {**others, **{name: call for name, call in OURS.items() if "everything" in name}}


def time_table(dtype_name: str, rounds: int, vocabulary: int, paths: str) -> dict:
    dtype = DTYPES[dtype_name]
    world = World(dtype, ROWS[dtype], vocabulary)
    limits = fastest_products(world)
    limit = limits.fastest
    work = {name: call for name, call in (references(limits) | cases(dtype)).items() if re.search(paths, name)}
    for number, (name, call) in enumerate(work.items()):  # compiles and warms up
        say(f"{dtype_name}: warming up {number + 1} of {len(work)}: {name}")
        call(world.first(256))
    ratios: dict[str, list[float]] = {name: [] for name in work}
    base = []
    for turn in range(rounds):
        base.append(cpu_seconds(limit))
        for number, (name, call) in enumerate(work.items()):
            say(f"{dtype_name}: round {turn + 1} of {rounds}, path {number + 1} of {len(work)}")
            ratios[name].append(cpu_seconds(lambda call=call: call(world)) / base[-1])
    return {
        "dtype": dtype_name,
        "rows": ROWS[dtype],
        "vocabulary": vocabulary,
        "rounds": rounds,
        "limit_seconds": statistics.median(base),
        "limit": str(limit),
        "one_layout": str(limits.one_layout),
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "quartiles": {name: statistics.quantiles(values, n=4)[::2] for name, values in ratios.items()},
    }


def one_memory(name: str, dtype_name: str, rows: int) -> int:
    dtype = DTYPES[dtype_name]
    world = World(dtype, rows)
    call = cases(dtype)[name]
    call(world.first(256))  # compiles; the compiler's memory must not count for the path
    return peak_memory(world, call)


def memory_table(jobs: list[tuple[str, str, int]]) -> list[dict]:
    found = []
    for number, (name, dtype, rows) in enumerate(jobs):
        say(f"memory {number + 1} of {len(jobs)}: {name}, {dtype}, N = {rows}")
        command = [sys.executable, __file__, "--one-memory", name, "--dtype", dtype, "--rows", str(rows)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append({"name": name, "dtype": dtype, "rows": rows, "bytes": int(result.stdout.split()[-1])})
    return found


def print_time(tables: list[dict], memory: list[dict]) -> None:
    held = {(m["name"], m["dtype"], m["rows"]): m["bytes"] for m in memory}
    heads = [f"{t['dtype']}, N = {t['rows']:,}, V = {t['vocabulary']:,}: × limit (quartiles)" for t in tables]
    print(f"| path | {' | '.join(heads)} | MB, bf16 | MB, fp32 |")
    print("|---|" + "---|" * (len(tables) + 2))
    for name in dict.fromkeys(n for t in tables for n in t["ratio"]):
        cells = []
        for table in tables:
            if name in table["ratio"]:
                low, high = table["quartiles"][name]
                cells.append(f"{table['ratio'][name]:.2f} ({low:.2f} to {high:.2f})")
            else:
                cells.append("–")
        for dtype_name, dtype in DTYPES.items():
            bytes_held = held.get((name, dtype_name, ROWS[dtype]))
            cells.append("–" if bytes_held is None else f"{bytes_held / 2**20:.0f}")
        print(f"| {name} | " + " | ".join(cells) + " |")
    for t in tables:
        print(f"\nLimit in {t['dtype']}, V = {t['vocabulary']:,}: {t['limit_seconds']:.2f} s. {t['limit']}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["time", "memory", "growth"], help="run one part instead of all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--vocabulary", type=int, default=V, help="number of ids in the vocabulary; for time only")
    parser.add_argument("--paths", default="", metavar="REGEX", help="time only paths whose name matches")
    parser.add_argument("--one-memory", metavar="PATH", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="bf16", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=1024, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one_memory:
        print(one_memory(args.one_memory, args.dtype, args.rows))
        return
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    numbers["machine"] = {"torch": torch.__version__, "processor": processor(), "threads": 1}
    if args.only in (None, "time"):
        tables = {(table["dtype"], table["vocabulary"]): table for table in numbers.get("time", [])}
        for dtype in args.dtypes.split(","):
            tables[dtype, args.vocabulary] = time_table(dtype, args.rounds, args.vocabulary, args.paths)
        numbers["time"] = list(tables.values())
    if args.only in (None, "memory"):
        jobs = [(name, "bf16", 1024) for name in cases(torch.bfloat16)]
        jobs += [(name, "bf16", 8192) for name in OURS if "frozen" in name]
        jobs += [(name, "fp32", 512) for name in OURS if "everything" in name]
        numbers["memory"] = memory_table(jobs)
    if args.only in (None, "growth"):
        numbers["growth"] = growth()
    say("")
    NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
    print_time(numbers.get("time", []), numbers.get("memory", []))
    if "growth" in numbers:
        print()
        print_growth(numbers["growth"])


if __name__ == "__main__":
    main()

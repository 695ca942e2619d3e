"""Growth of the vocabulary pass's time and memory with tokens, vocabulary, ids and ranks, with fitted lines.

    python benchmarks/vocabulary_growth.py                       # all axes
    python benchmarks/vocabulary_growth.py vocabulary tokens     # some of them; the stored others stay

Every point runs in a separate process and measures the CPU time of one forward and backward pass with all outputs
(median of five, or of as many as fit into two minutes) and the peak resident memory above the inputs. With a frozen
head the entropy has no gradient. Ranks share this machine's cores, so the figure is each rank's CPU time, not the wall
clock.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from vocabulary_world import NUMBERS, World, peak_memory, say

import trustrl
from trustrl.core.token_logprobs import VocabShard

BASE = {"tokens": 1024, "vocabulary": 65_536, "ids": 64, "ranks": 1, "frozen": False}
SIZE = 512
POINTS = {
    "tokens": [1024, 2048, 4096, 8192],
    "tokens, frozen head": [1024, 4096, 16_384, 32_768],
    "vocabulary": [32_768, 65_536, 131_072, 262_144],
    "ids": [64, 256, 512, 1024],
    "ranks": [1, 2, 4, 8],
}
REPEATS, ENOUGH_SECONDS, FEW = 5, 120.0, 256
MEASURES = {"cpu_seconds": "CPU seconds", "bytes_held": "bytes held", "bytes_sent": "bytes sent"}


def step(world: World, shard: VocabShard | None, frozen: bool) -> None:
    hidden, head = world.leaves(frozen)
    entropy = "detached" if frozen else True
    out = trustrl.token_logprobs(hidden, head, world.token, gather_ids=world.ids, entropy=entropy, shard=shard)
    world.loss(out, entropy=not frozen).backward()


def measure(rank: int, point: dict, folder: str) -> None:
    """Measures one rank and writes its figures to a file."""
    torch.set_num_threads(1)
    ranks = point["ranks"]
    part = point["vocabulary"] // ranks
    world = World(torch.bfloat16, point["tokens"], part, SIZE, point["ids"])
    g = torch.Generator().manual_seed(1)  # ids over the whole vocabulary, the same on every rank
    world.token = torch.randint(0, point["vocabulary"], world.token.shape, generator=g)
    world.ids = torch.randint(0, point["vocabulary"], world.ids.shape, generator=g)
    shard = None
    if ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        shard = VocabShard(None, rank * part)
    step(world.first(FEW), shard, point["frozen"])  # compiles
    times: list[float] = []

    def timed(world: World) -> None:
        start = time.process_time()
        step(world, shard, point["frozen"])
        times.append(time.process_time() - start)

    held = peak_memory(world, timed)
    # Ranks take the same number of steps, because each step has collectives.
    while len(times) < (REPEATS if ranks > 1 or sum(times) < ENOUGH_SECONDS else 1):
        timed(world)
    sent = 4 * (point["ids"] + 3) * point["tokens"] if ranks > 1 else 0  # a test counts the transferred bytes
    figures = {"cpu_seconds": statistics.median(times), "bytes_held": held, "bytes_sent": sent}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(figures, file)
    if ranks > 1:
        dist.destroy_process_group()


def run_point(point: dict) -> dict:
    """Returns the figures of one point, as the median over its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--point", json.dumps(point), folder]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        found = []
        for rank in range(point["ranks"]):
            with open(f"{folder}/{rank}.json") as file:
                found.append(json.load(file))
    return {key: statistics.median(one[key] for one in found) for key in MEASURES}


def line(x: list[float], y: list[float]) -> dict:
    """Returns the least-squares fit y = a + b x and the share of the variance that it explains."""
    slope, intercept = statistics.linear_regression(x, y)
    return {"intercept": intercept, "slope": slope, "r2": statistics.correlation(x, y) ** 2 if len(set(y)) > 1 else 1.0}


def growth(axes: tuple[str, ...] = tuple(POINTS)) -> dict:
    """Returns points, figures and fitted lines of every axis. The fits over ranks use 1 / ranks."""
    found: dict = {"base": BASE, "size": SIZE, "axes": {}}
    for axis in axes:
        values, points = POINTS[axis], []
        for value in values:
            say(f"growth: {axis} = {value:,}")
            key, _, kind = axis.partition(", ")
            points.append(run_point({**BASE, key: value, "frozen": kind == "frozen head"}))
        x = [1 / v if axis == "ranks" else float(v) for v in values]
        fits = {key: line(x, [p[key] for p in points]) for key in ("cpu_seconds", "bytes_held")}
        found["axes"][axis] = {"values": values, "points": points, "fits": fits}
    return found


def print_growth(found: dict) -> None:
    print("| axis | points | CPU seconds | fit, R² | MB held | fit, R² |")
    print("|---|---|---|---|---|---|")
    for axis, data in found["axes"].items():
        seconds = ", ".join(f"{p['cpu_seconds']:.2f}" for p in data["points"])
        held = ", ".join(f"{p['bytes_held'] / 2**20:.0f}" for p in data["points"])
        time_fit, memory_fit = data["fits"]["cpu_seconds"], data["fits"]["bytes_held"]
        unit = "1/ranks" if axis == "ranks" else axis.partition(",")[0]
        memory_line = f"{memory_fit['intercept'] / 2**20:.0f} MB + {memory_fit['slope']:.4g} B · {unit}"
        print(
            f"| {axis} | {', '.join(f'{v:,}' for v in data['values'])} | {seconds} "
            f"| {time_fit['intercept']:.2f} + {time_fit['slope']:.3g} · {unit}, {time_fit['r2']:.3f} | {held} "
            f"| {memory_line}, {memory_fit['r2']:.3f} |"
        )


def main() -> None:
    if sys.argv[1:2] == ["--point"]:
        point, folder = json.loads(sys.argv[2]), sys.argv[3]
        if point["ranks"] == 1:
            measure(0, point, folder)
        else:
            mp.spawn(measure, args=(point, folder), nprocs=point["ranks"])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", choices=[*POINTS, []], metavar="AXIS", help=", ".join(map(repr, POINTS)))
    found = growth(tuple(parser.parse_args().axes) or tuple(POINTS))
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    axes = numbers.get("growth", {}).get("axes", {}) | found["axes"]
    numbers["growth"] = found | {"axes": {axis: axes[axis] for axis in POINTS if axis in axes}}
    NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
    print_growth(found)


if __name__ == "__main__":
    main()

"""Growth of the vocabulary pass's time and memory with tokens, vocabulary, ids and ranks, with fitted lines.

    python benchmarks/vocabulary_growth.py

Every point runs in a separate process and measures the CPU time of one forward and backward pass with all outputs
(median of five) and the peak resident memory above the inputs. Ranks share this machine's cores, so the figure is each
rank's CPU time, not the wall clock.
"""

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
from vocabulary_world import World, peak_memory, say

import trustrl
from trustrl.core.token_logprobs import VocabShard

BASE = {"tokens": 1024, "vocabulary": 65_536, "ids": 64, "ranks": 1}
SIZE = 512
POINTS = {
    "tokens": [1024, 2048, 4096, 8192],
    "vocabulary": [32_768, 65_536, 131_072, 262_144],
    "ids": [64, 256, 512, 1024],
    "ranks": [1, 2, 4, 8],
}
MEASURES = {"cpu_seconds": "CPU seconds", "bytes_held": "bytes held", "bytes_sent": "bytes sent"}


def step(world: World, shard: VocabShard | None) -> None:
    hidden, head = world.leaves(frozen=False)
    out = trustrl.token_logprobs(hidden, head, world.token, gather_ids=world.ids, entropy=True, shard=shard)
    world.loss(out, entropy=True).backward()


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
    step(world, shard)  # compiles
    held = peak_memory(world, lambda w: step(w, shard))
    times = []
    for _ in range(5):
        start = time.process_time()
        step(world, shard)
        times.append(time.process_time() - start)
    sent = 4 * (point["ids"] + 3) * point["tokens"] if ranks > 1 else 0  # a test counts the transferred bytes
    figures = {"cpu_seconds": statistics.median(times), "bytes_held": held, "bytes_sent": sent}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(figures, file)
    if ranks > 1:
        dist.destroy_process_group()


def run_point(point: dict) -> dict:
    """Returns the figures of one point, as the median over its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, json.dumps(point), folder]
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


def growth() -> dict:
    """Returns points, figures and fitted lines of every axis. The fits over ranks use 1 / ranks."""
    found: dict = {"base": BASE, "size": SIZE, "axes": {}}
    for axis, values in POINTS.items():
        points = []
        for value in values:
            say(f"growth: {axis} = {value:,}")
            points.append(run_point({**BASE, axis: value}))
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
        unit = "1/ranks" if axis == "ranks" else axis
        memory_line = f"{memory_fit['intercept'] / 2**20:.0f} MB + {memory_fit['slope']:.4g} B · {unit}"
        print(
            f"| {axis} | {', '.join(f'{v:,}' for v in data['values'])} | {seconds} "
            f"| {time_fit['intercept']:.2f} + {time_fit['slope']:.3g} · {unit}, {time_fit['r2']:.3f} | {held} "
            f"| {memory_line}, {memory_fit['r2']:.3f} |"
        )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        point, folder = json.loads(sys.argv[1]), sys.argv[2]
        if point["ranks"] == 1:
            measure(0, point, folder)
        else:
            mp.spawn(measure, args=(point, folder), nprocs=point["ranks"])
    else:
        print_growth(growth())

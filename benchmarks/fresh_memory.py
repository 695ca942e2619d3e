"""Share of a Top-K region's CPU time that goes to fresh memory.

    python benchmarks/fresh_memory.py

Times region and loss (`dppo-topk-tv`, 65,536 tokens, K = 20, forward and backward, one thread) in alternating
processes: with glibc's default allocator settings, and with settings that keep the heap, so that no step touches a new
page.
"""

import os
import resource
import statistics
import subprocess
import sys
import time

import torch
from region_cost import Batch

import trustrl

ROUNDS, STEPS = 3, 15
KEPT = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_TOP_PAD_": "500000000"}


def measure() -> None:
    """Prints the median CPU milliseconds of a step and the page faults per step."""
    torch.set_num_threads(1)
    step = Batch().ours(trustrl.preset("dppo-topk-tv"), compiled=False, measured=False)
    for _ in range(3):
        step()
    times, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(STEPS):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // STEPS
    print(1e3 * statistics.median(times), faults)


def main() -> None:
    print("| round | ms, default | page faults per step | ms, heap kept | page faults per step | ratio |")
    print("|---|---|---|---|---|---|")
    for round_ in range(ROUNDS):
        found = []
        for more in ({}, KEPT):
            done = subprocess.run(
                [sys.executable, __file__, "once"],
                env={**os.environ, **more},
                capture_output=True,
                text=True,
                check=True,
            )
            found.append([float(x) for x in done.stdout.split()])
        (default, faults), (kept, left) = found
        print(f"| {round_ + 1} | {default:.1f} | {faults:.0f} | {kept:.1f} | {left:.0f} | {kept / default:.2f} |")


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["once"] else main()

"""One measured step, in a process of its own, which prints bytes.

`memory_worker.py V ROWS trained|accumulating|frozen yes|detached [D]`
"""

import sys
from pathlib import Path

import torch

import trustrl


def step(head, rows, entropy):
    hidden = torch.randn(rows, head.shape[1]).bfloat16().requires_grad_()
    ids = torch.randint(0, len(head), (rows, 65))
    out = trustrl.token_logprobs(hidden, head, ids[:, 0], gather_ids=ids[:, 1:], entropy=entropy)
    loss = out.logp.sum() + out.tail_logp.sum() + (out.entropy.sum() if entropy is True else 0.0)
    loss.backward()


def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def main(vocabulary, rows, kind, entropy, size="64"):
    torch.set_num_threads(1)
    head = torch.empty(int(vocabulary), int(size), dtype=torch.bfloat16)
    for part in head.split(8192):
        part.normal_(std=0.05)
    head.requires_grad_(kind != "frozen")
    entropy = True if entropy == "yes" else entropy
    step(head, 256, entropy)  # compiles
    if kind != "accumulating":
        head.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident("VmRSS")
    step(head, int(rows), entropy)
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Forward passes on fake CUDA tensors. Run as a program: `cases.py <library> <torch's libraries>`.

An operation that needs a value raises, because a fake tensor has none; so does one that mixes devices.
"""

import ctypes
import json
import sys
import traceback
from pathlib import Path


def load(library, libraries):
    """Registers the device. Must run before torch is imported."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(libraries) / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    load(*sys.argv[1:])

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import trustrl
from support.device_counts import counted
from support.kernel_counts import micro_batch
from support.vocabulary_cases import CASES, call
from support.worlds import mapped

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOSSES = [(name, dtype) for name in trustrl.presets() for dtype in DTYPES]
READS = [(name, dtype, head) for name in CASES for dtype in DTYPES for head in ("trained", "frozen")]

CONTROLS = {
    "nothing": lambda x: torch.where(x > 1, x, 0.0).sum(),
    "the definition of the vocabulary pass": lambda x: call(
        "one temperature per token", device="cuda", impl="reference"
    )[0](),
    "item": lambda x: x.sum().item(),
    "condition": lambda x: bool((x > 1).any()),
    "boolean indices": lambda x: x[x > 1],
    "nonzero": lambda x: x.nonzero(),
    "tolist": lambda x: x.tolist(),
    "two devices": lambda x: x + torch.ones(4),
    "copy from the host": lambda x: torch.tensor([1.0, 2.0], device=x.device),
}


def loss_and_sums(name, dtype):
    """Prepares a region's loss on a fake batch."""
    tokens, record, region, reduction = micro_batch(name, DTYPES[dtype])

    def like(x):
        return torch.empty(x.shape, dtype=x.dtype, device="cuda", requires_grad=x.requires_grad)

    def prepare():
        policy, rollout = mapped(tokens, like), mapped(record, like)

        def run():
            out = trustrl.policy_loss(policy, rollout, region, reduction=reduction)
            assert out.loss.is_cuda, out.loss.device
            assert all(x.is_cuda for x in (*out.sums.added.values(), *out.sums.highest.values()))

        return run

    return prepare


def vocabulary(name, dtype, head):
    """Prepares a pass over the vocabulary, its inside included."""
    return lambda: call(name, device="cuda", dtype=DTYPES[dtype], head_gradient=head == "trained")[0]


def control(name):
    """Prepares an operation that must or must not be refused."""

    def prepare():
        x = torch.ones(4, device="cuda")
        return lambda: CONTROLS[name](x)

    return prepare


def answer(prepare):
    """Returns what a forward pass raised, or the waits and copies that it made, or ""."""
    with FakeTensorMode():
        run = prepare()
        try:
            with counted() as counts:
                run()
        except Exception as error:
            lines = [f"{x.filename}:{x.lineno}" for x in traceback.extract_tb(error.__traceback__)]
            ours = [line for line in lines if "/trustrl/" in line]
            return f"{type(error).__name__}: {str(error).splitlines()[0]} {ours[-1:]}"
    return str(counts) if counts.waits or counts.copies else ""


def main():
    """Prints the answers of all cases as JSON."""
    cases = {f"control {name}": control(name) for name in CONTROLS}
    cases |= {f"loss {' '.join(case)}": loss_and_sums(*case) for case in LOSSES}
    cases |= {f"vocabulary {' '.join(case)}": vocabulary(*case) for case in READS}
    print(json.dumps({name: answer(prepare) for name, prepare in cases.items()}))


if __name__ == "__main__":
    main()

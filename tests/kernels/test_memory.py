"""Memory of one forward and backward pass: the peak, measured in processes of their own, and the largest tensors.

The head is narrow: what is held beside its gradient are tiles of logits, which do not depend on its width.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.device_counts import Counts
from support.largest_tensor import LargestTensor
from trustrl.kernels import devices, tile_math
from trustrl.kernels.pass_inputs import PassInputs, given_logits, weighted_head_rows

V, SMALL_V, D, N = 151_936, 32_768, 64, 1024
HEAD_MB, KEPT_MB = V * D * 2 / 2**20, SMALL_V * 512 * 2 / 2**20
WORKER = Path(__file__).with_name("memory_worker.py")
# glibc raises its mmap threshold with every large block it frees, and then keeps freed blocks below that size, which
# count as resident memory. With a fixed threshold it returns every freed tile.
ENVIRONMENT = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}


@pytest.mark.compiled
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("vocabulary", "rows", "head", "entropy", "size", "limit_mb"),
    [
        (V, N, "trained", "yes", D, HEAD_MB + 40),
        pytest.param(V, N, "frozen", "yes", D, 40, marks=pytest.mark.long),
        (SMALL_V, 8 * N, "frozen", "detached", D, 100),
        (SMALL_V, 512, "trained", "yes", 512, KEPT_MB + 40),
        pytest.param(SMALL_V, 512, "accumulating", "yes", 512, KEPT_MB + 40, marks=pytest.mark.long),
    ],
    ids=["trained head", "frozen head", "frozen head, 8,192 tokens", "kept products", "kept products, accumulating"],
)
def test_memory_is_the_heads_gradient_and_a_few_tiles(vocabulary, rows, head, entropy, size, limit_mb):
    """All logits in bf16 would be 297 MB for 1,024 tokens at a real vocabulary, and 512 MB for 8,192 at a smaller one.

    An accumulated gradient is there before the measured step, which makes another one, as without kept products.
    """
    command = [sys.executable, WORKER, str(vocabulary), str(rows), head, entropy, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    used = int(done.stdout.split()[-1]) / 2**20
    assert used <= limit_mb, f"{used:.0f} MB"


@pytest.mark.parametrize("tokens", [1, 100, 1024, 4096, 16_384, 100_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_tile_of_an_accelerator_uses_its_bytes_and_no_more(tokens, dtype):
    hidden = torch.empty(tokens, 8, dtype=dtype, device="meta")
    rows, columns = devices.tile_sizes(hidden, dtype)
    assert rows <= tokens
    assert columns % devices.COLUMN_STEP == 0
    used = rows * columns * dtype.itemsize
    assert 0.9 * devices.TILE_BYTES < used <= devices.TILE_BYTES


def many_ids(device, tokens, num_ids, size):
    hidden, head = (torch.zeros(rows, size, dtype=torch.bfloat16, device=device) for rows in (tokens, 100))
    ids = torch.zeros(tokens, num_ids, dtype=torch.long, device=device)
    scale = torch.ones(tokens, device=device)
    return PassInputs(hidden, head, None, ids, ids == 0, scale, None, torch.bfloat16, 1024, 4096)


def test_given_head_rows_are_never_gathered_all_at_once(monkeypatch):
    """17 GB at this size. Shapes alone are computed: `meta` is not a CPU, so the sizes are those of an accelerator."""
    monkeypatch.setattr(tile_math.fused_dots, "broken", True)  # as without a compiler
    inputs = many_ids("meta", 16_384, 65, 4096)
    with LargestTensor() as largest, Counts() as counts:
        logits = given_logits(inputs)
    assert 0.9 * devices.TILE_BYTES / 4 < largest.elements <= devices.TILE_BYTES // 4
    with LargestTensor() as largest:
        weighted_head_rows(logits, inputs)
    assert largest.elements == inputs.hidden.numel()
    assert sum(counts.kernels.values()) < 1000, str(counts)


def test_on_a_cpu_the_gathered_rows_stay_small(monkeypatch):
    monkeypatch.setattr(devices, "CPU_GATHERED_BYTES", 4096)
    inputs = many_ids("cpu", 50, 7, 16)
    inputs = inputs._replace(hidden=torch.randn(50, 16), head=torch.randn(100, 16), product_dtype=torch.float32)
    with LargestTensor() as largest:
        found = given_logits(inputs)
    assert largest.elements <= 4096 // 4
    torch.testing.assert_close(found, (inputs.hidden @ inputs.head[0]).unsqueeze(-1).expand(50, 7))


def test_a_compiler_that_fails_does_not_bring_the_gathered_rows_back(monkeypatch):
    """The first call falls back too, and it must fall back to blocks."""
    fused = tile_math.FusedFunction(tile_math.dots, tile_math.dots_by_blocks)
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: lambda *a: 1 / 0)
    monkeypatch.setattr(devices, "CPU_GATHERED_BYTES", 4096)
    args = (torch.randn(50, 16), torch.randn(100, 16), torch.zeros(50, 7, dtype=torch.long), torch.float32)
    with LargestTensor() as largest, pytest.warns(UserWarning, match="could not be compiled"):
        fused(*args, large=True)
    assert largest.elements <= 4096 // 4

"""Peak memory of one forward and backward pass, measured in processes of their own.

The head is narrow: what is held beside its gradient are tiles of logits, which do not depend on its width.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

V, SMALL_V, D, N = 151_936, 32_768, 64, 1024  # D as in the worker
HEAD_MB = V * D * 2 / 2**20
WORKER = Path(__file__).with_name("memory_worker.py")
# glibc raises its mmap threshold with every large block it frees, and then keeps freed blocks below that size, which
# count as resident memory. With a fixed threshold it returns every freed tile.
ENVIRONMENT = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}


@pytest.mark.compiled
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("vocabulary", "rows", "head", "entropy", "limit_mb"),
    [
        (V, N, "trained", "yes", HEAD_MB + 40),
        (V, N, "frozen", "yes", 40),
        (SMALL_V, 8 * N, "frozen", "detached", 100),
    ],
    ids=["trained head", "frozen head", "frozen head, 8,192 tokens"],
)
def test_memory_is_the_heads_gradient_and_a_few_tiles(vocabulary, rows, head, entropy, limit_mb):
    """All logits in bf16 would be 297 MB for 1,024 tokens at a real vocabulary, and 512 MB for 8,192 at a smaller one."""
    command = [sys.executable, WORKER, str(vocabulary), str(rows), head, entropy]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    used = int(done.stdout.split()[-1]) / 2**20
    assert used <= limit_mb, f"{used:.0f} MB"

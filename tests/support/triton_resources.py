"""Registers, spills and shared memory of Triton kernels compiled ahead of time for four kinds of GPU."""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile

import pytest

TARGETS = {  # backend, architecture, threads per warp, bytes of shared memory a block may have
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}


def resources(kernel):
    """(registers per thread, registers or bytes spilled, bytes of shared memory per block)."""
    import triton

    if "amdgcn" in kernel.asm:
        names = ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
        registers, spilled, stack = (int(re.search(rf"\.{name}:\s*(\d+)", kernel.asm["amdgcn"])[1]) for name in names)
        return registers, spilled + stack, kernel.metadata.shared
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # These kernels have no arrays of their own: whatever lies on the stack was spilled there.
    registers, stack, local = (int(re.search(rf"\b{name}:(\d+)", listing)[1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local, kernel.metadata.shared


def one_line_each(figures):
    """One line per kernel, so that a change is one line in a diff."""
    return re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", json.dumps(figures, indent=2, default=list))


@functools.cache
def compiled_apart(script):
    """The figures that a script prints, from a process where Triton compiles whatever TRITON_INTERPRET says here."""
    pytest.importorskip("triton", reason="triton is not installed; `pip install triton==3.7.1` goes with torch 2.13")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

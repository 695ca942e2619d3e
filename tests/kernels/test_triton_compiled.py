"""The Triton kernels, compiled ahead of time as they would be launched: no spilled register, shared memory that fits.

No GPU is needed. After a change to a kernel or to its launch table, look at the new figures and record them:

    python tests/kernels/test_triton_compiled.py > tests/kernels/triton_resources.json
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiled

RECORDED = Path(__file__).with_name("triton_resources.json")

TARGETS = {  # backend, architecture, threads per warp, bytes of shared memory a block may have
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}
DTYPES = {"bf16": 2, "fp32": 4}
VARIANTS = {"plain": {"bias": None, "softcap": None}, "bias and softcap": {}}
KERNELS = ("rest_kernel", "dz_kernel", "known_kernel")

D = 1024
TYPES = {
    "scale": "*fp32", "base": "*fp32", "on_rest": "*fp32", "on_log": "*fp32", "partials": "*fp32", "put": "*fp32",
    "ids": "*i32", "starts": "*i32", "stay": "*i32", "softcap": "fp32",
}  # fmt: skip
IN_THE_INPUTS_DTYPE = ("hidden", "head", "bias", "dz")
MULTIPLES_OF_16 = ("D", "width", "first")


def compiled(kernel, target, dtype, constants):
    """One kernel for one target, specialised as a launch with aligned tensors would specialise it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trustrl.kernels import triton_pass

    backend, architecture, warp, _ = TARGETS[target]
    launch = triton_pass.LAUNCHES[backend, DTYPES[dtype]]
    if kernel == "known_kernel":
        constants = triton_pass.KNOWN_LAUNCH | constants
    else:
        constants = triton_pass.compile_time(launch, D) | constants
    if kernel == "rest_kernel":
        constants["TILES"] = launch.tiles_per_split
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    function = getattr(triton_pass, kernel)
    signature, attributes = {}, {}
    for at, name in enumerate(function.arg_names):
        kind = f"*{dtype}" if name in IN_THE_INPUTS_DTYPE else TYPES.get(name, "i32")
        signature[name] = "constexpr" if name in constants else kind
        if name not in constants and (kind.startswith("*") or name in MULTIPLES_OF_16):
            attributes[at,] = [["tt.divisibility", 16]]
        if name not in constants and kind.startswith("*") and backend == "hip":
            attributes[at,].append(["tt.pointer_range", 32])  # tensors below 2 GB
    constants = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget(backend, architecture, warp), options=options)


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


def everything():
    """target → "dtype kernel variant" → [registers, spilled, shared]; and kernels whose sizes are 1, on one target."""
    import triton

    found = {
        target: {
            f"{dtype} {kernel} {variant}": resources(compiled(kernel, target, dtype, dict(constants)))
            for dtype in DTYPES
            for kernel in KERNELS
            for variant, constants in VARIANTS.items()
        }
        for target in TARGETS
    }
    ones = dict.fromkeys(("N", "V", "D", "C", "splits", "tiles"), 1)
    for kernel in KERNELS:
        compiled(kernel, "sm_90", "bf16", ones | {"EVEN_DEPTH": False})
    return {"triton": triton.__version__, "figures": "registers per thread, spilled, shared bytes per block", **found}


@functools.cache
def compiled_apart():
    """In a process of its own, where Triton compiles whatever TRITON_INTERPRET says here."""
    pytest.importorskip("triton", reason="triton is not installed; `pip install triton==3.7.1` goes with torch 2.13")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills_and_shared_memory_fits(target):
    found = compiled_apart()[target]
    assert len(found) == len(DTYPES) * len(KERNELS) * len(VARIANTS)
    for name, (registers, spilled, shared) in found.items():
        assert spilled == 0, name
        assert 0 < registers <= 255, name
        assert shared <= TARGETS[target][-1], name


@pytest.mark.parametrize("target", TARGETS)
def test_the_recorded_figures_hold(target):
    found, recorded = compiled_apart(), json.loads(RECORDED.read_text())
    if found["triton"] != recorded["triton"]:
        pytest.skip(f"the figures are those of triton {recorded['triton']}, this is {found['triton']}")
    assert found[target] == recorded[target]


if __name__ == "__main__":
    # One line per kernel, so that a change is one line in a diff.
    print(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", json.dumps(everything(), indent=2)))

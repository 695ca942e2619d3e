"""The Triton kernels of the loss, compiled ahead of time as they would be launched: no spilled register. No GPU is needed.

After a change to a kernel or to its launch, look at the new figures and record them:

    PYTHONPATH=tests python tests/kernels/test_token_kernels_compiled.py > tests/kernels/token_kernel_resources.json
"""

import json
from pathlib import Path

import pytest

from support.triton_resources import TARGETS, compiled_apart, one_line_each, resources

pytestmark = pytest.mark.compiled

RECORDED = Path(__file__).with_name("token_kernel_resources.json")

BOOLEANS = {
    "in_loss", "valid", "usable_out", "usable", "keep", "overflow", "outside_out", "active_out", "outside_in", "active_in",
    "sound",
}  # fmt: skip
WHOLE = {"ids", "tokens", "version"}
NUMBERS = {"n", "per_advantage", "trained_version", "width", "num_bins", "bound_step"}
IN_THE_RECORDS_DTYPE = {
    "logp", "behavior", "proximal", "anchor_columns", "own_columns", "anchor_tail", "own_tail", "blanked", "slope",
    "entropy", "projected", "pull_out", "d_projected", "d_pull", "d_logp", "d_own_columns", "d_own_tail", "weights",
}  # fmt: skip
"""Everything else is a pointer to float64."""

COLUMNS = ("ids", "valid", "anchor_columns", "own_columns", "tokens", "anchor_tail", "own_tail")


def launches():
    """name → (kernel, compile-time constants): what a binary region, a Top-K region and TROLL launch, with all inputs."""
    from trustrl.core.impl import triton as steps
    from trustrl.kernels import projection_kernels, projection_pass, sum_kernels, token_kernels, token_pass

    clean = {
        "READS_BEHAVIOR": True, "READS_PROXIMAL": True, "FROM_BEHAVIOR": True, "LARGEST": 1e-3, "NOISE": 0.5,
        "MASS_COARSE": 1.02, "MASS_FINE": 1.001, "LEFT_OUT": None, "NO_TAIL": False, "sound": None,
    }  # fmt: skip
    named = {
        "clean": (
            token_kernels.clean_kernel,
            clean | dict.fromkeys(COLUMNS) | {"ROWS": token_pass.BLOCK, "COLUMNS": 1},
        ),
        "terms": (token_kernels.terms_kernel, {"LARGEST": 3e31, "ROWS": token_pass.BLOCK}),
        "sums": (
            sum_kernels.sums_kernel,
            steps.SETTINGS
            | {
                "bounded": True,
                "around_sampler": True,
                "NUM_SUMS": sum_kernels.NUM_SUMS,
                "NUM_EXTREMES": sum_kernels.NUM_EXTREMES,
            }
            | {"ROWS": token_pass.BLOCK},
        ),
    }
    for k in (20, 64):
        padded = 1 << (k - 1).bit_length()
        named[f"clean, {k} columns"] = (
            token_kernels.clean_kernel,
            clean | {"ROWS": token_pass.TILE // padded, "COLUMNS": padded},
        )
        rows, padded = projection_pass.tile(k)
        both = {"TAIL_FLOOR": 1e-7, "NO_TAIL": False, "ROWS": rows, "COLUMNS": padded}
        named[f"project, {k} columns"] = (
            projection_kernels.project_kernel,
            both | {"SLACK": 1e-4, "EVALUATIONS": 32},
        )
        named[f"project backward, {k} columns"] = (
            projection_kernels.project_backward_kernel,
            both | {"BY_SUBTRACTION": True, "d_own_tail": None},
        )
    return named


def compiled(kernel, constants, target):
    """One kernel for one target, specialised as a launch with aligned float32 records would specialise it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trustrl.kernels import token_pass

    backend, architecture, warp, _ = TARGETS[target]
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in NUMBERS:
            signature[name] = "i32"
        else:
            kind = "i1" if name in BOOLEANS else "i64" if name in WHOLE else "fp64"
            signature[name] = "*fp32" if name in IN_THE_RECORDS_DTYPE else f"*{kind}"
            attributes[place,] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": token_pass.WARPS}
    return triton.compile(source, target=GPUTarget(backend, architecture, warp), options=options)


def everything():
    """target → launch → [registers per thread, spilled, shared bytes per block]."""
    import triton

    figures = {
        target: {name: resources(compiled(kernel, dict(constants), target)) for name, (kernel, constants) in launches().items()}
        for target in TARGETS
    }  # fmt: skip
    return {"triton": triton.__version__, "figures": "registers per thread, spilled, shared bytes per block", **figures}


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills_and_shared_memory_fits(target):
    for name, (registers, spilled, shared) in compiled_apart(__file__)[target].items():
        assert spilled == 0, name
        assert 0 < registers <= 255, name
        assert shared <= TARGETS[target][-1], name


@pytest.mark.parametrize("target", TARGETS)
def test_the_recorded_figures_hold(target):
    figures, recorded = compiled_apart(__file__), json.loads(RECORDED.read_text())
    if figures["triton"] != recorded["triton"]:
        pytest.skip(f"the figures are those of triton {recorded['triton']}, this is {figures['triton']}")
    assert figures[target] == recorded[target]


if __name__ == "__main__":
    print(one_line_each(everything()))

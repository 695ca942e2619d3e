"""The Triton kernels, compiled ahead of time as they would be launched: no spilled register, shared memory that fits.

No GPU is needed. After a change to a kernel or to its launch table, look at the new figures and record them:

    PYTHONPATH=tests python tests/kernels/test_triton_compiled.py > tests/kernels/triton_resources.json
    PYTHONPATH=tests python tests/kernels/test_triton_compiled.py --table    # for docs/guides/vocabulary.md
"""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest

from support.triton_resources import TARGETS, compiled_apart, one_line_each, resources

pytestmark = pytest.mark.compiled

RECORDED = Path(__file__).with_name("triton_resources.json")

DTYPES = {"bf16": 2, "fp32": 4}
WITHOUT = dict.fromkeys(("bias", "other_bias", "softcap"))
KERNELS = {  # name → the kernel, and the arguments that are None
    "rest": ("rest_kernel", {"best_raw": None, "best_ids": None, "K": 0}),
    "rest and top-k": ("rest_kernel", {}),
    "given": ("given_kernel", {}),
    "divergence": ("divergence_kernel", {}),
    "dz": ("dz_kernel", {}),
    "known": ("known_kernel", {}),
}
VARIANTS = ("plain", "bias and softcap", "odd sizes", "tensors above 2 GB")
"""Odd sizes: a vocabulary that is not a multiple of 16, and a hidden size that is not one of the tile's depth."""

HIDDEN_SIZES, VOCABULARIES = (1024, 2048, 4096, 8192), (32_000, 49_152, 128_256, 151_936, 262_144)
"""One binary serves them all: sizes are arguments, of which Triton looks at "is 1" and "is a multiple of 16"."""

FLOATS = ("scale", "base", "other_base", "on_rest", "on_log", "partials", "put", "best_raw", "out")
INTEGERS = ("ids", "starts", "stay", "order", "num_live", "best_ids")
IN_THE_INPUTS_DTYPE = ("hidden", "head", "bias", "other_hidden", "other_head", "other_bias", "dz")
MULTIPLES_OF_16 = ("D", "other_D", "width", "first")


def kind_of(name, dtype):
    if name in IN_THE_INPUTS_DTYPE:
        return f"*{dtype}"
    return "*fp32" if name in FLOATS else "*i32" if name in INTEGERS else "fp32" if name == "softcap" else "i32"


def compile_constants(name, backend, dtype, hidden_size):
    """The launch's own constants, as `triton_pass` and `triton_divergence` pass them."""
    from trustrl.kernels import triton_launch

    if name in ("given", "known"):
        return dict(triton_launch.ID_LAUNCH)
    own = {"divergence": triton_launch.DIVERGENCE_LAUNCHES, "rest and top-k": triton_launch.TOP_K_LAUNCHES}
    table = own.get(name, triton_launch.LAUNCHES)
    constants = triton_launch.compile_time(table[backend, DTYPES[dtype]], hidden_size)
    return constants | ({"SLOTS": triton_launch.SLOTS} if name.startswith("rest") else {})


def compiled(name, target, dtype, variant, constants=None):
    """One kernel for one target, specialised as a launch with aligned tensors would specialise it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trustrl.kernels import triton_kernels

    backend, architecture, warp, _ = TARGETS[target]
    odd = variant == "odd sizes"
    kernel, absent = KERNELS[name]
    constants = compile_constants(name, backend, dtype, 1040 if odd else 1024) | absent | (constants or {})
    constants |= WITHOUT if variant == "plain" else {}
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages") if key in constants}
    function = getattr(triton_kernels, kernel)
    signature, attributes = {}, {}
    for at, argument in enumerate(function.arg_names):
        kind = kind_of(argument, dtype)
        signature[argument] = "constexpr" if argument in constants else kind
        pointer = kind.startswith("*")
        if argument in constants:
            continue
        if pointer or argument in MULTIPLES_OF_16 or (argument == "V" and not odd):
            attributes[at,] = [["tt.divisibility", 16]]
        if pointer and backend == "hip" and variant != "tensors above 2 GB":
            attributes[at,].append(["tt.pointer_range", 32])
    constants = {key: value for key, value in constants.items() if key in signature}
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget(backend, architecture, warp), options=options)


def threads_keep_their_candidates(kernel):
    """True if the lists of the best products are loaded and stored in one layout, by the threads that hold each cell.

    A thread then reads only what it wrote itself, and no barrier has to order its stores before another thread's loads.
    """
    from trustrl.kernels import triton_launch

    touched = re.findall(rf"(load|store).*tensor<\d+x{triton_launch.SLOTS}x.*, (#\w+)>", kernel.asm["ttgir"])
    return sorted(word for word, _ in touched) == ["load", "store", "store"] and len({at for _, at in touched}) == 1


def cases(target):
    """(name in the recorded figures, arguments of `compiled`). Only AMD's compiler is told the size of a tensor."""
    for dtype in DTYPES:
        for name in KERNELS:
            for variant in VARIANTS if TARGETS[target][0] == "hip" else VARIANTS[:-1]:
                yield f"{dtype} {name}, {variant}", (name, target, dtype, variant)


def everything(targets):
    """target → kernel → [registers, spilled, shared]; and kernels whose sizes are 1, on one target."""
    import triton

    found = {}
    for target in targets:
        kernels = {case: compiled(*args) for case, args in cases(target)}
        found[target] = {case: resources(kernel) for case, kernel in kernels.items()}
        for case, kernel in kernels.items():
            assert "top-k" not in case or threads_keep_their_candidates(kernel), case
    ones = dict.fromkeys(("N", "V", "D", "other_D", "C", "K", "splits", "tiles"), 1)
    for name in KERNELS if "sm_90" in targets else ():
        compiled(name, "sm_90", "bf16", "odd sizes", ones)
    return {"triton": triton.__version__, "figures": "registers per thread, spilled, shared bytes per block", **found}


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills_and_shared_memory_fits(target):
    found = compiled_apart(__file__)[target]
    assert list(found) == [case for case, _ in cases(target)]
    for name, (registers, spilled, shared) in found.items():
        assert spilled == 0, name
        assert 0 < registers <= 255, name
        assert shared <= TARGETS[target][-1], name


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_one_binary_serves_every_usual_size(backend):
    pytest.importorskip("triton")
    for name, dtype in itertools.product(KERNELS, DTYPES):
        assert all(
            compile_constants(name, backend, dtype, size) == compile_constants(name, backend, dtype, 1024)
            for size in HIDDEN_SIZES
        )
    assert all(size % 16 == 0 for size in (*HIDDEN_SIZES, *VOCABULARIES))


@pytest.mark.parametrize("target", TARGETS)
def test_the_recorded_figures_hold(target):
    found, recorded = compiled_apart(__file__), json.loads(RECORDED.read_text())
    if found["triton"] != recorded["triton"]:
        pytest.skip(f"the figures are those of triton {recorded['triton']}, this is {found['triton']}")
    assert found[target] == recorded[target]


def table():
    """The recorded figures as rows of Markdown: for each kernel the largest of its variants."""
    recorded = json.loads(RECORDED.read_text())
    lines = ["| kernel | " + " | ".join(TARGETS) + " |", "|---" * (1 + len(TARGETS)) + "|"]
    for dtype, name in itertools.product(DTYPES, KERNELS):
        cells = []
        for target in TARGETS:
            figures = [x for case, x in recorded[target].items() if case.startswith(f"{dtype} {name},")]
            registers, _, shared = map(max, zip(*figures, strict=True))
            cells.append(f"{registers}, {shared / 1024:.3g} KB")
        lines.append(f"| {name}, {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_guide_shows_the_recorded_figures():
    guide = (Path(__file__).parents[2] / "docs/guides/vocabulary.md").read_text()
    shown = guide.partition("<!-- begin kernels -->\n")[2].partition("\n<!-- end kernels -->")[0]
    assert shown == table()


if __name__ == "__main__" and sys.argv[1:] == ["--table"]:
    print(table())
elif __name__ == "__main__":
    print(one_line_each(everything(sys.argv[1:] or TARGETS)))

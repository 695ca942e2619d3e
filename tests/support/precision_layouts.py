"""Layouts in which a policy is compared with itself, by engine, and the processes that run them.

`python -m support.precision_layouts verl rows.json`, in the engine's environment, measures all layouts of the engine.
Kinds of regions after the file, such as TROLL, measure those alone.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from support import self_divergence as own
from support.devices import ON_GPU, need_ranks
from support.rendezvous import TESTS, own_environment, python_path

HALVES = ("bf16", "fp16")
WIDE_AND_BF16 = ("fp32", "bf16")
WITHOUT_GPU = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

WORKERS = {
    "TRL": "trl_precision_worker.py",
    "ms-swift": "swift_precision_worker.py",
    "OpenRLHF": "openrlhf_precision_worker.py",
    "SkyRL": "skyrl_precision_worker.py",
}
"""The workers that run without verl."""


class Layout(NamedTuple):
    """One layout of an engine's worker."""

    ranks: int = 1
    settings: dict[str, Any] = {}
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")


LAYOUTS = {
    "TRL": {
        "autocast": Layout(precisions=("fp32", "bf16")),  # accelerate's fp16 needs a GPU
        "weights in half precision": Layout(settings={"half_weights": True}, precisions=HALVES),
        "FSDP2": Layout(settings={"fsdp2": True}),
        "FSDP2, float32 head": Layout(settings={"fsdp2": True, "float32_head": True}, precisions=HALVES),
        "FSDP2, two ranks": Layout(2, {"fsdp2": True}),
    },
    "verl": {
        "FSDP2": Layout(),
        "FSDP2, recorded in other micro-batches": Layout(settings={"recorded_rows": 3}),
        "FSDP2, no padding, recomputed activations": Layout(settings={"remove_padding": True, "checkpointing": True}),
        "FSDP2, two ranks": Layout(2),
        "FSDP1, two ranks": Layout(2, {"strategy": "fsdp"}),
        "Ulysses on two ranks": Layout(2, {"remove_padding": True, "ulysses": 2}),
    },
    # verl's optimizer for fp16 on Megatron needs transformer-engine, and so a GPU.
    "Megatron": {
        "one rank": Layout(precisions=WIDE_AND_BF16),
        "tensor parallel 2": Layout(2, {"tp": 2}, WIDE_AND_BF16),
        "pipeline parallel 2": Layout(2, {"pp": 2}, WIDE_AND_BF16),
        "context parallel 2": Layout(2, {"cp": 2}, WIDE_AND_BF16),
        "experts, expert parallel 2": Layout(2, {"moe": True, "ep": 2}, WIDE_AND_BF16),
    },
    "ms-swift": {
        "autocast": Layout(precisions=WIDE_AND_BF16),
        "weights in half precision": Layout(settings={"half_weights": True}, precisions=HALVES),
        "FSDP2, two ranks": Layout(2, {"fsdp2": True}),
    },
    "SkyRL": {"FSDP2": Layout(precisions=WIDE_AND_BF16), "FSDP2, two ranks": Layout(2, precisions=WIDE_AND_BF16)},
    "OpenRLHF": {"weights in half precision": Layout(precisions=HALVES)},
    "VeOmni": {
        "two ranks, padded": Layout(2, {"packed": False}, HALVES),
        "Ulysses on two ranks": Layout(2, {"ulysses": 2}, ("bf16",)),
        "experts, expert parallel 2": Layout(2, {"moe": True, "expert_parallel": 2}, ("bf16",)),
    },
}


def run(engine: str, name: str, precision: str, model: str, kinds: Any = tuple(own.KINDS)) -> list[dict[str, Any]]:
    """Returns the rows of one layout, measured in processes of their own.

    Args:
        engine: A key of `LAYOUTS`.
        name: A layout of the engine.
        precision: One of the layout's precisions.
        model: The folder that `own.model_folder` filled.
        kinds: The kinds of regions.
    """
    layout = LAYOUTS[engine][name]
    about = {"engine": engine, "layout": name, "precision": precision}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        arguments = [model, out, json.dumps(about), json.dumps(list(kinds)), json.dumps(layout.settings)]
        if engine in WORKERS:
            on_torchrun(WORKERS[engine], layout.ranks, arguments)
        else:
            from support.verl_launch import LOADED, ON_MEGATRON, on_ranks  # needs no verl, and is verl's

            script, where = {
                "verl": ("verl_precision.py", "verl"),
                "Megatron": ("megatron_precision.py", "verl_megatron"),
                "VeOmni": ("veomni_precision.py", "verl_veomni"),
            }[engine]
            modules = ON_MEGATRON if engine == "Megatron" else LOADED
            on_ranks(script, layout.ranks, *arguments, folder=where, modules=modules)
        return json.loads(out.read_text())


def on_torchrun(script: str, ranks: int, arguments: list[Any]) -> None:
    """Runs a worker of this folder on ranks of its own. Its last words are the error's."""
    need_ranks(ranks)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]
    done = subprocess.run(
        [*map(str, [*launcher, TESTS / "support" / script, *arguments])],
        env=own_environment(PYTHONPATH=python_path(), **{} if ON_GPU else WITHOUT_GPU),
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def main(engine: str, out: str, *kinds: str) -> None:
    """Measures every layout of an engine in every precision, and writes the rows.

    Args:
        engine: A key of `LAYOUTS`.
        out: The file of rows.
        *kinds: The kinds of regions, all by default.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = own.model_folder(Path(folder))
        for name, layout in LAYOUTS[engine].items():
            for precision in layout.precisions:
                found = run(engine, name, precision, model, kinds or tuple(own.KINDS))
                outside = [row["kind"] for row in found if row["within"] is False]
                print(f"{engine}, {name}, {precision}: outside the bound: {outside or 'none'}", flush=True)
                rows += found
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(rows, ensure_ascii=False))
    own.check(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Ranks of a verl worker, each a process: no Ray, and verl as it loads us in every process."""

import subprocess
import sys

from support.devices import ON_GPU, need_ranks
from support.rendezvous import TESTS, own_environment, python_path

ENGINES = TESTS / "engines"
LOADED = ("trustrl_verl_cpu.plugin", "trustrl.engines.verl")
ON_MEGATRON = ("trustrl_verl_cpu.plugin", "trustrl_verl_cpu.megatron_plugin", "trustrl.engines.verl")


WITHOUT_GPU = {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def on_ranks(script, ranks, *arguments, folder="verl", modules=LOADED):
    """Runs a script of tests/engines/verl, or another folder, on so many ranks; returns what it printed."""
    need_ranks(ranks)
    loaded = modules[-1:] if ON_GPU else modules  # the others replace a GPU by the CPU
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]
    done = subprocess.run(
        [*map(str, [*launcher, ENGINES / folder / script, *arguments])],
        env=own_environment(
            VERL_USE_EXTERNAL_MODULES=",".join(loaded), PYTHONPATH=python_path(), **{} if ON_GPU else WITHOUT_GPU
        ),
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout

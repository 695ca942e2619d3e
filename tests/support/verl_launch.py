"""Ranks of a verl worker on the CPU, each a process: no Ray, and verl as it loads us in every process."""

import subprocess
import sys

from support.rendezvous import TESTS, own_environment, python_path

ENGINES = TESTS / "engines"
LOADED = ("trustrl.engines.verl_cpu.plugin", "trustrl.engines.verl")
ON_MEGATRON = ("trustrl.engines.verl_cpu.plugin", "trustrl.engines.verl_cpu.megatron_plugin", "trustrl.engines.verl")


def on_ranks(script, ranks, *arguments, folder="verl", modules=LOADED):
    """Runs a script of tests/engines/verl, or another folder, on so many ranks; returns what it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]
    done = subprocess.run(
        [*map(str, [*launcher, ENGINES / folder / script, *arguments])],
        env=own_environment(
            VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES=",".join(modules),
            OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
            PYTHONPATH=python_path(),
        ),
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout

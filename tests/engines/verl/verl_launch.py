"""Ranks of a verl worker on the CPU, each a process: no Ray, and verl as it loads us in every process."""

import os
import subprocess
import sys
from pathlib import Path

from engines.rendezvous import own_environment

HERE = Path(__file__).parent


def on_ranks(script, ranks, *arguments):
    """Runs a script beside this file on so many ranks; returns what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks, HERE / script]
    done = subprocess.run(
        [*map(str, [*command, *arguments])],
        env=own_environment(
            VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="trustrl.engines.verl_cpu.plugin,trustrl.engines.verl",
            OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
            PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        ),
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout

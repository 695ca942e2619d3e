"""The command `trustrl` on the smallest recipe, in a process of its own."""

import subprocess
import sys
from pathlib import Path

from support.rendezvous import own_environment

ROOT = Path(__file__).parents[2]


def command(verb, *arguments, ranks=1):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    recipe = str(ROOT / "recipes/sanity.toml")
    return [sys.executable, *launcher, "-m", "trustrl.cli", verb, recipe, *map(str, arguments)]


def environment(**more):
    return own_environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT / "src"), **more)


def run(*arguments, ranks=1, **more):
    return subprocess.run(
        command(*arguments, ranks=ranks), env=environment(**more), capture_output=True, text=True, check=False,
        timeout=400,
    )  # fmt: skip

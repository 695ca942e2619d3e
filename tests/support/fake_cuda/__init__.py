"""A CUDA device for fake tensors on a machine without one. A fake tensor has a shape and a device, and no values.

A CPU build of torch refuses the device "cuda" for fake tensors too. A small library, which g++ compiles in seconds,
registers a device that runs nothing. It must be loaded before torch is imported, so that everything runs in a process
of its own: `answers`.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
TORCH = Path(importlib.util.find_spec("torch").submodule_search_locations[0])


def build(folder):
    """Compiles the library and returns its path.

    Raises:
        AssertionError: If the compiler fails; holds its message.
    """
    library = Path(folder) / "fake_cuda.so"
    headers = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    links = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", *headers, FOLDER / "device.cpp", *links, "-o", library]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def answers(library):
    """Runs every case of `cases` in a new process. Returns what each raised or counted, by name; "" if nothing."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, FOLDER / "cases.py", library, TORCH / "lib"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

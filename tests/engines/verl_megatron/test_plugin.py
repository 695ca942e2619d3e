"""Megatron's plugin refuses a process in which it could change a run on a GPU, and releases that it does not know."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("verl")
pytest.importorskip("megatron.core")

PROGRAM = """
import importlib, os
from importlib import metadata
from unittest.mock import patch
import torch
from trustrl.errors import EngineError

def said():
    try:
        importlib.import_module("trustrl_verl_cpu.megatron_plugin")
    except EngineError as error:
        return str(error)

version = metadata.version
print("platform:", said())
assert torch.zeros(1).type() == "torch.FloatTensor"
os.environ["VERL_PLATFORM"] = "cpu"
with patch.object(torch.cuda, "is_available", lambda: True):
    print("gpu:", said())
with patch.object(metadata, "version", lambda name: "0.15.3" if name == "megatron-core" else version(name)):
    print("release:", said())
assert torch.zeros(1).type() == "torch.FloatTensor"
from mbridge.core.bridge import Bridge
with patch.object(Bridge, "export_weights", lambda self, chunks: None):
    print("signature:", said())
print("known:", said())
assert torch.zeros(1, device="cuda").cuda().type() == "torch.cuda.FloatTensor"
from verl.workers.config import McoreEngineConfig
print("precision:", McoreEngineConfig(dtype="float32").dtype)
try:
    McoreEngineConfig(dtype="float8")
except AssertionError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def said():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=400, env=environment)
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(line.split(": ", 1) for line in run.stdout.splitlines() if ": " in line)


@pytest.mark.xdist_group("plugin")
@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("platform", "VERL_PLATFORM must be 'cpu' to import trustrl_verl_cpu.megatron_plugin, got None"),
        ("gpu", "trustrl_verl_cpu.megatron_plugin must run without a GPU"),
        ("release", "megatron-core must be 0.16 or 0.18 for Megatron on a CPU, got 0.15.3"),
        ("signature", "Bridge.export_weights must take ('self', 'models'), got ('self', 'chunks')"),
        ("known", "None"),
        ("precision", "float32"),
        ("refused", "dtype float8 not supported"),
    ],
)
def test_the_plugin_says_what_it_refuses(case, sentence, said):
    assert said[case].startswith(sentence)

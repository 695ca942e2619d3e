"""Small checkpoint directories, and ways to damage them."""

import json
import os
import struct
import zipfile

from trustrl.runner.manifests import Seal, write_manifest
from trustrl.runner.signing import Key

OURS = Seal(Key(bytes(32)), "a" * 32)
"""Author of the checkpoints here: a key and a run."""


def safetensors(numbers=4):
    header = json.dumps({"w": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * numbers)


def checkpoint(folder, step=8, *, seal=OURS):
    """A directory with one file of each format, signed unless `seal` is None."""
    made = folder / f"checkpoint-{step}"
    (made / "deeper").mkdir(parents=True)
    (made / "model.safetensors").write_bytes(safetensors())
    (made / "trainer_state.json").write_text('{"global_step": 8}')
    for name in ("optimizer.pt", "deeper/rng_state.pth"):
        with zipfile.ZipFile(made / name, "w") as file:
            file.writestr("data", bytes(100))
    if seal is not None:
        write_manifest(made, seal)
    return made


def truncate(path):
    os.truncate(path, path.stat().st_size - 3)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

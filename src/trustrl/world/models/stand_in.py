"""Tiny models of known architectures that stand in for large ones in rehearsals, and the problems they answer.

A stand-in answers every problem with 1, 2 or 3 in a box, each about as often. All problems have one of these answers,
so that the completions of a prompt have different rewards and every update has a gradient.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trustrl.optional_imports import need
from trustrl.world import cache
from trustrl.world.models import tiny
from trustrl.world.progress import ProgressDisplay

FORMAT = 2  # incremented when the content of the directories changes
STEPS, BATCH = 150, 16
LETTERS = [chr(code) for code in range(32, 127)]
INSTRUCTIONS = ("", "\nPut the final answer in a box.", "\nPut the final answer within \\boxed{}.")
SHAPE = {
    "vocab_size": tiny.Tiny.vocab_size, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": tiny.HEAD_DIM, "max_position_embeddings": 16_384,
    "tie_word_embeddings": False, "initializer_range": 0.05, "dtype": "float32",
    "pad_token_id": tiny.SPECIAL.index(tiny.PAD), "bos_token_id": tiny.SPECIAL.index(tiny.BOS),
    "eos_token_id": tiny.SPECIAL.index(tiny.EOS),
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}  # fmt: skip


def created(architecture: str) -> Path:
    """Returns a directory with the stand-in of an architecture and its tokenizer. Trains it once, for seconds."""
    return cache.folder(f"stand-in-{architecture}-{FORMAT}", lambda folder: _save(architecture, folder))


def _save(architecture: str, folder: Path) -> None:
    transformers, tokenizer = need("transformers", extra="models"), byte_tokenizer()
    more = EXPERTS if architecture.endswith("_moe") else {}
    config = transformers.AutoConfig.for_model(architecture, **SHAPE, **more)
    with torch.random.fork_rng(), ProgressDisplay(f"training a stand-in ({architecture})", STEPS) as progress:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.02, STEPS)
        for step, (ids, labels) in zip(range(STEPS), _batches(tokenizer), strict=False):
            loss = model(input_ids=ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
            progress.update(step + 1, f"loss {loss.item():.3f}")
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def byte_tokenizer() -> Any:
    """Returns a tokenizer with one token per byte, which transformers loads in the same way for every architecture."""
    tokenizers = need("tokenizers", extra="models")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    words = [*tiny.SPECIAL, *sorted(byte_level.alphabet())]
    core = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, []))
    core.pre_tokenizer, core.decoder = byte_level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    return tiny.loadable(core)


def _batches(tokenizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields token ids of chats and plain texts, padded on the right, and labels of their answers alone."""
    draw, problems = random.Random(0), list(subtractions())
    while True:
        ids, labels = [], []
        for text, _ in draw.sample(problems, BATCH):
            # Letters at random, so that words of a recipe's own template do not change the answer.
            letters = "".join(draw.choices(LETTERS, k=draw.randrange(60)))
            prompt = text + draw.choice((*INSTRUCTIONS, f"\n{letters}", f"\n{letters}{{}}"))
            if draw.random() < 0.5:
                chat = [{"role": "user", "content": prompt}]
                prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            answer = f"\\boxed{{{draw.randint(1, 3)}}}{tokenizer.eos_token}"
            before, after = (tokenizer(part, add_special_tokens=False).input_ids for part in (prompt, answer))
            ids.append(torch.tensor(before + after))
            labels.append(torch.tensor([-100] * len(before) + after))
        pad = torch.nn.utils.rnn.pad_sequence
        yield pad(ids, True, tokenizer.pad_token_id), pad(labels, True, -100)


def subtractions() -> Iterator[tuple[str, int]]:
    """Yields 294 problems with their answers."""
    for a in range(2, 100):
        for answer in (1, 2, 3):
            yield f"What is {a + answer} - {a}?", answer


def problems_file(columns: Mapping[str, Any], prompt: str, answer: str, *, few: bool = False) -> Path:
    """Returns a JSONL file with the problems, in the columns of another set of data.

    Args:
        columns: Values of the other columns, by name; `a.b` is the key `b` of the column `a`.
        prompt: Name of the column with the prompt.
        answer: Name of the column with the answer.
        few: True for 4 problems, which the other file lacks.
    """
    problems = list(subtractions())
    lines = []
    for text, result in problems[:4] if few else problems[4:]:
        row: dict[str, Any] = {}
        for name, value in {**columns, prompt: text, answer: str(result)}.items():
            *path, last = name.split(".")
            table = row
            for key in path:
                table = table.setdefault(key, {})
            table[last] = value
        lines.append(json.dumps(row) + "\n")
    content = "".join(lines)
    name = f"stand-in-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    return cache.folder(name, lambda folder: (folder / "problems.jsonl").write_text(content)) / "problems.jsonl"

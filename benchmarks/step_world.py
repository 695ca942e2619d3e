"""What the whole-step benchmarks share: a model, a rollout with a sampler's records, tables of time and of memory."""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from vocabulary_limit import cpu_seconds
from vocabulary_world import processor, resident, say

from trustrl import regions
from trustrl.world import models

TOP_K = regions.TopKTV(max_increase=0.15, max_decrease=0.15, k=20)
REGIONS = {
    "DPPO Binary TV, μ": regions.DPPO(),
    "DPPO Top-20 TV, π'": regions.DPPO(TOP_K, anchor="proximal"),
    "TROLL, 64 ids, π'": regions.TROLL(k=64),
    "DPPO Top-20 TV, μ": regions.DPPO(TOP_K),
}
STOCK = "stock"
MB = 2**20


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models as kinds

    words = {"<pad>": 0, "<eos>": 1, "a": 2}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(kinds.WordLevel(words, unk_token="a")), pad_token="<pad>", eos_token="<eos>"
    )


def folder_of(name: str, scratch: str) -> str:
    """Returns the folder of a model: one of trustrl's by name, or "tiny": V 512, D 128, 4 layers."""
    if name != "tiny":
        return str(models.path(name))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(scratch)
    tokenizer().save_pretrained(scratch)
    return scratch


def loaded(folder: str) -> tuple[Any, Any]:
    """Returns a model in float32 and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


class Rollouts:
    """Prompts of random tokens, completions sampled with noise in the logits, and the records of that sampler."""

    @torch.no_grad()
    def __init__(self, model: Any, rows: int, prompt: int, completion: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(3, model.config.vocab_size, (rows, prompt), generator=draw)
        ids, logp, tops = [], [], []
        out = model(self.prompts, use_cache=True)
        for _ in range(completion):
            logits = out.logits[:, -1].float()
            noisy = torch.log_softmax(logits + 0.02 * torch.randn(logits.shape, generator=draw), -1)
            kept = noisy.exp().index_fill(-1, torch.arange(3), 0.0)  # no padding and no end, so that lengths are equal
            ids.append(torch.multinomial(kept, 1, generator=draw))
            logp.append(noisy.gather(-1, ids[-1]))
            tops.append(noisy.topk(64, -1))
            out = model(ids[-1], past_key_values=out.past_key_values, use_cache=True)
        self.completions, self.logp = torch.cat(ids, -1), torch.cat(logp, -1)
        self.top_logp, self.top_ids = (torch.stack(parts, 1) for parts in zip(*tops, strict=True))


class Passes:
    """Counter of the tokens that enter a model's transformer, prompts and padding included."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        model.base_model.register_forward_hook(self._counted, with_kwargs=True)

    def _counted(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *__: Any) -> None:
        self.count += (args[0] if args else kwargs["input_ids"]).numel()


def bootstrap(ratios: list[float]) -> tuple[float, float]:
    """Returns the 95% interval of the median."""
    draw = torch.Generator().manual_seed(0)
    x = torch.tensor(ratios)
    medians = x[torch.randint(len(x), (2000, len(x)), generator=draw)].median(-1).values.sort().values
    return medians[50].item(), medians[1949].item()


Cycle = Callable[[], None]
"""All updates of one trainer with one rollout."""


def print_times(made: dict[str, Cycle], passes: dict[str, Passes], rounds: int, tokens: int) -> None:
    """Runs all cycles in turn, in another order each round, and prints their CPU seconds.

    Args:
        made: The cycles, warmed up.
        passes: The counter of each cycle's model.
        rounds: The number of rounds.
        tokens: The tokens of one forward pass of the rollout.
    """
    seconds: dict[str, list[float]] = {name: [] for name in made}
    counts = {name: [] for name in made}
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds}")
        for name in [*list(made)[turn % len(made) :], *list(made)[: turn % len(made)]]:
            before = passes[name].count
            seconds[name].append(cpu_seconds(made[name]))
            counts[name].append((passes[name].count - before) / tokens)
    say("")
    print("| | CPU seconds | × stock, median [95% interval] | forward passes |\n|---|---|---|---|")
    for name, values in seconds.items():
        ratios = [mine / theirs for mine, theirs in zip(values, seconds[STOCK], strict=True)]
        low, high = bootstrap(ratios)
        text = "1" if name == STOCK else f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"
        print(f"| {name} | {statistics.median(values):.2f} | {text} | {statistics.mean(counts[name]):g} |", flush=True)


def print_memory(script: str, options: list[str]) -> None:
    """Prints the peak memory of each cycle, in a separate process each."""
    print("| | peak of a cycle, MB | × stock | added by the cycle, MB |\n|---|---|---|---|")
    first = None
    for name in [STOCK, *REGIONS]:
        command = [sys.executable, script, *options, "--one", name]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        highest, added = (int(x) for x in result.stdout.split()[-2:])
        first = first or highest
        print(f"| {name} | {highest / MB:,.0f} | {highest / first:.3f} | {added / MB:,.0f} |", flush=True)


def print_peak(cycle: Cycle) -> None:
    """Prints the peak resident bytes of one cycle in this process, and those above what was there before."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    cycle()
    highest = resident("VmHWM")
    print(highest, highest - before)


def run(
    document: str, script: str, made_of: Callable[[Any, list[str]], tuple[dict[str, Cycle], dict[str, Passes]]]
) -> None:
    """Reads the options and prints the table.

    Args:
        document: The script's docstring.
        script: The script's file.
        made_of: Returns the warmed-up cycles and their counters, from the options and the names of the trainers.
    """
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=["tiny", "smollm2-135m"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a rollout")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=96, help="tokens of a completion")
    parser.add_argument("--updates", type=int, default=2, help="updates with one rollout")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one:
        print_peak(made_of(args, [args.one])[0][args.one])
        return
    print(f"{processor()}. {args.model}, {args.rows} × ({args.prompt} + {args.completion}) tokens\n", flush=True)
    if args.memory:
        options = [f"--{name}={getattr(args, name)}" for name in ("model", "rows", "prompt", "completion", "updates")]
        print_memory(script, options)
        return
    tokens = args.rows * (args.prompt + args.completion)
    print_times(*made_of(args, [STOCK, *REGIONS]), args.rounds, tokens)

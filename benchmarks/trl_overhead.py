"""Cost of a region in a TRL step, relative to TRL's loss on the same batch.

    python benchmarks/trl_overhead.py [--pairs 30]

Measures (a) forward, region, loss, metrics and backward of one micro-batch, as a ratio to stock `GRPOTrainer`, and (b)
the anchor's extra pass (the proximal forward that records what the region needs), as a share of that step. Times are
CPU times of one thread, alternating; medians over pairs with a 95% bootstrap interval. The step excludes generation,
which makes the ratios larger than in a real run.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from step_world import bootstrap, tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import trustrl
from trustrl.engines.trl import TrustRegionGRPOTrainer

SIZES = {
    "tiny: V 512, D 128, 4 layers, 128 × (6 + 4) tokens": {
        "vocab": 512, "hidden": 128, "layers": 4, "rows": 128, "prompt": 6, "completion": 4,
    },
    "small: V 512, D 128, 4 layers, 32 × (32 + 64) tokens": {
        "vocab": 512, "hidden": 128, "layers": 4, "rows": 32, "prompt": 32, "completion": 64,
    },
    "wide: V 151,936, D 256, 4 layers, 2 × (32 + 64) tokens": {
        "vocab": 151_936, "hidden": 256, "layers": 4, "rows": 2, "prompt": 32, "completion": 64,
    },
}  # fmt: skip
REGIONS = ["ppo", "dppo-binary-tv", "dppo-topk-tv", "troll"]


def model(size: dict) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=size["vocab"], hidden_size=size["hidden"], intermediate_size=2 * size["hidden"],
            num_hidden_layers=size["layers"], num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            tie_word_embeddings=False,
        )
    )  # fmt: skip


def trainer(name: str | None, size: dict, folder: str):
    settings = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, num_generations=2,
        per_device_train_batch_size=size["rows"], max_completion_length=size["completion"], num_iterations=2,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["a"] * 8})
    more = {}
    if name is not None:
        more = {"region": trustrl.preset(name), "behavior": "trainer", "startup_checks": False}
    made = (GRPOTrainer if name is None else TrustRegionGRPOTrainer)(
        model(size), lambda completions, **_: [0.0] * len(completions), args=settings, train_dataset=data,
        processing_class=tokenizer(), **more,
    )  # fmt: skip
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    return made


def rollout(size: dict) -> dict:
    draw = torch.Generator().manual_seed(1)
    rows, prompt, completion = size["rows"], size["prompt"], size["completion"]
    return {
        "prompt_ids": torch.randint(2, size["vocab"], (rows, prompt), generator=draw),
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.long),
        "completion_ids": torch.randint(2, size["vocab"], (rows, completion), generator=draw),
        "completion_mask": torch.ones(rows, completion, dtype=torch.long),
        "advantages": torch.randn(rows, generator=draw),
        "num_items_in_batch": torch.tensor(rows * completion),
        "old_per_token_logps": torch.full((rows, completion), -6.0),
    }


def cpu(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


class Inside:
    """Timer of the CPU seconds inside some methods, which it replaces on their owner."""

    def __init__(self, *methods: tuple[object, str]) -> None:
        self.seconds = 0.0
        for owner, name in methods:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call):
        def timed(*args, **kwargs):
            start = time.process_time()
            found = call(*args, **kwargs)
            self.seconds += time.process_time() - start
            return found

        return timed


def step(made, inputs) -> None:
    loss = made._compute_loss(made.model, inputs)
    loss.backward()
    made.model.zero_grad()


def measure(label: str, size: dict, pairs: int, folder: str) -> dict:
    stock, inputs = trainer(None, size, folder), rollout(size)
    found = {}
    for name in REGIONS:
        ours = trainer(name, size, folder)

        def record(ours=ours):
            bare = {k: v for k, v in inputs.items() if k != "old_per_token_logps"}
            return ours._recorder.record(ours.model, bare, version=0, rows=size["rows"])

        given = {**inputs, **record()}
        theirs = {
            **inputs,
            "old_per_token_logps": given.get("trustrl_behavior_logp", given.get("trustrl_proximal_logp")),
        }
        for _ in range(2):
            step(stock, theirs), step(ours, given)
        ratios, passes = [], []
        for at in range(pairs):
            order = [(stock, theirs), (ours, given)]
            times = {}
            for made, batch in order if at % 2 else reversed(order):
                times[made is ours] = cpu(lambda made=made, batch=batch: step(made, batch))
            ratios.append(times[True] / times[False])
            passes.append(cpu(record) / times[False])
        low, high = bootstrap(ratios)
        found[name] = {
            "ratio": statistics.median(ratios), "interval": [low, high], "anchor_pass": statistics.median(passes)
        }  # fmt: skip
        numbers = f"{found[name]['ratio']:.3f} [{low:.3f}, {high:.3f}]  pass {found[name]['anchor_pass']:.2f}"
        print(f"{label:58} {name:16} {numbers}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            label: measure(label, size, options.pairs, folder) for label, size in SIZES.items() if options.only in label
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

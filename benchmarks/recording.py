"""Cost of recording in a TRL step: time, host memory and disk.

    python benchmarks/recording.py [--steps 12]

A step is forward, region, loss, metrics and backward of eight micro-batches. It excludes generation and optimizer,
which makes the shares larger than in a real run. Steps with and without recording alternate in one run. Time has two
figures: the seconds inside the recorder as a share of the step, and the ratio of neighboring steps. Times are CPU times
of all threads, as medians and as means, since not every step writes a file. Bytes are those of the ring and the files.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from step_world import bootstrap, tokenizer
from trl_overhead import Inside, model

import trustrl
from trustrl import regions
from trustrl.recording import EntropySlope, NonFinite, QuantileAbove, Recording, read, sequence_ids

MICRO_BATCHES = 8
SIZES = {
    "V 512, D 128, 4 layers, 64 sequences of 32 + up to 256 tokens": {
        "vocab": 512, "hidden": 128, "layers": 4, "rows": 8, "prompt": 32, "completion": 256,
    },
    "the same, 512 sequences of 6 + up to 4 tokens": {
        "vocab": 512, "hidden": 128, "layers": 4, "rows": 64, "prompt": 6, "completion": 4,
    },
}  # fmt: skip
TRIGGERS = (
    QuantileAbove(of="divergence", level=1.0),
    QuantileAbove(of="log_ratio", level=1e3),
    EntropySlope(max_fall=1e3),
    NonFinite(),
)
"""Triggers that check every step and never fire."""
CASES = {
    "ring of 8 steps, sample 1 %": {"sample": 0.01},
    "ring of 8 steps, sample 100 %": {"sample": 1.0, "max_rows_per_step": 10**9},
    "sample 1 % alone": {"sample": 0.01, "ring_steps": 0, "triggers": ()},
    "ring and top-K, sample 1 %": {"sample": 0.01, "topk": True},
}


def trainer(size: dict, folder: str, recording: Recording, region: regions.Region):
    from datasets import Dataset
    from trl import GRPOConfig

    from trustrl.engines.trl import TrustRegionGRPOTrainer

    settings = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, num_generations=2,
        per_device_train_batch_size=size["rows"], max_completion_length=size["completion"], num_iterations=2,
        gradient_accumulation_steps=MICRO_BATCHES,
    )  # fmt: skip
    made = TrustRegionGRPOTrainer(
        model(size), lambda completions, **_: [0.0] * len(completions), args=settings, region=region,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}), processing_class=tokenizer(), behavior="trainer",
        startup_checks=False, recording=recording,
    )  # fmt: skip
    made.model.train()
    made.current_gradient_accumulation_steps = MICRO_BATCHES
    return made


def rollouts(made, size: dict) -> list[dict]:
    """Returns micro-batches whose anchors are the model's own log-probs plus noise."""
    draw, found = torch.Generator().manual_seed(1), []
    rows, prompt, completion = size["rows"], size["prompt"], size["completion"]
    for _ in range(MICRO_BATCHES):
        lengths = torch.randint(completion // 2, completion + 1, (rows, 1), generator=draw)
        mask = (torch.arange(completion) < lengths).long()
        inputs = {
            "prompt_ids": torch.randint(2, size["vocab"], (rows, prompt), generator=draw),
            "prompt_mask": torch.ones(rows, prompt, dtype=torch.long),
            "completion_ids": torch.randint(2, size["vocab"], (rows, completion), generator=draw) * mask,
            "completion_mask": mask,
            "advantages": torch.randn(rows, generator=draw),
        }
        added = made._recorder.record(made.model, inputs, version=0, rows=rows)
        noise = 0.1 * torch.randn(rows, completion, generator=draw)
        added["trustrl_behavior_logp"] = (added["trustrl_behavior_logp"] + noise).clamp(max=-1e-6)
        found.append({**inputs, **added})
    total = sum(inputs["completion_mask"].sum() for inputs in found)
    return [{**inputs, "num_items_in_batch": total} for inputs in found]


def step(made, batches: list[dict], at: int) -> float:
    start = time.process_time()
    made.state.global_step = at
    for number, inputs in enumerate(batches):
        made.accelerator.gradient_state._set_sync_gradients(number == len(batches) - 1)
        names = sequence_ids(step=at, rollout=number, rank=0, count=len(inputs["completion_ids"]))
        made._compute_loss(made.model, {**inputs, "trustrl_sequence": names}).backward()
    made.model.zero_grad()
    return time.process_time() - start


def measure(size: dict, case: dict, steps: int) -> dict:
    region = trustrl.preset("dppo-topk-tv" if case.get("topk") else "dppo-binary-tv")
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(**{"folder": f"{folder}/records", "triggers": TRIGGERS} | case)
        made = trainer(size, folder, recording, region)
        metrics, batches = made._region_metrics, rollouts(made, size)
        recorder = metrics._recorder
        inside = Inside((recorder, "add"), (recorder, "end_step"))
        step(made, batches, 0)
        shares, ratios = [], []
        for pair in range(1, steps + 1):
            times = {}
            for on in (True, False) if pair % 2 else (False, True):
                metrics._recorder = recorder if on else None
                inside.seconds = 0.0
                times[on] = step(made, batches, pair)
                if on:
                    shares.append(inside.seconds / times[True])
            ratios.append(times[True] / times[False])
        tokens = int(batches[0]["num_items_in_batch"])
        files = list(Path(folder, "records").glob("*.parquet"))
        rows = len(read(Path(folder, "records")).table) if files else 0
        kept = sum(len(part) for _, parts in recorder.ring.steps() for part in parts)
        return {
            "tokens_per_step": tokens,
            "share_median": statistics.median(shares),
            "share_mean": statistics.fmean(shares),
            "ratio_median": statistics.median(ratios),
            "ratio_interval": bootstrap(ratios),
            "milliseconds_per_step": 1e3 * statistics.fmean(shares) * times[True],
            "ring_bytes_per_token": recorder.ring.nbytes / kept if kept else 0,
            "disk_bytes_per_row": sum(file.stat().st_size for file in files) / rows if rows else None,
            "rows_per_file": rows / len(files) if files else 0,
            "steps_with_a_file": len(files) / (steps + 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for label, size in SIZES.items():
        for name, case in CASES.items():
            if options.only in f"{label}: {name}":
                found[f"{label}: {name}"] = one = measure(size, case, options.steps)
                print(f"{label}: {name}: {json.dumps(one)}", file=sys.stderr)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

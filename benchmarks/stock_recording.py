"""Cost of `record(trainer)` in a step of TRL's own `GRPOTrainer`.

    python benchmarks/stock_recording.py [--pairs 20]

A step is one rollout by transformers, rewards, forward, loss and backward of one micro-batch; with recording, also ids,
texts and the files of the step. Two trainers with equal weights take turns. Times are CPU times of one thread. Time has
two figures: the median ratio of neighboring steps with a 95% bootstrap interval, and the median seconds inside the
record's own code as a share of the step, with and without its generation. Bytes are those of the files.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from step_world import bootstrap
from trl_overhead import Inside, cpu, trainer

from trustrl.engines.trl import record
from trustrl.engines.trl.rollout_rows import RolloutRows
from trustrl.engines.trl.stock_record import StockRecord
from trustrl.recording import read

SIZE = {"vocab": 512, "hidden": 128, "layers": 4, "rows": 64, "prompt": 6, "completion": 64}
CASES = {
    "the default share": {},
    "every sequence": {"sample": 1.0},
    "every sequence, a region observes": {"sample": 1.0, "region": "cispo"},
    "1% of the sequences": {"sample": 0.01},
}


def step(made, at: int) -> tuple[float, float]:
    """Returns the CPU seconds of the rollout and of the loss."""
    made.state.global_step = at
    inputs = {}
    torch.manual_seed(at)  # both trainers sample the same tokens
    rollout = cpu(lambda: inputs.update(made._generate_and_score_completions([{"prompt": "a"}] * SIZE["rows"])))

    def loss() -> None:
        made._compute_loss(made.model, inputs).backward()
        made.model.zero_grad()

    return rollout, cpu(loss)


def measure(case: dict, pairs: int, inside: Inside) -> dict:
    region = case.get("region")
    with tempfile.TemporaryDirectory() as folder:
        plain, recorded = (trainer(None, SIZE, folder) for _ in range(2))
        if region is not None:
            from trustrl import preset

            case = case | {"region": preset(region, anchor="proximal")}
        record(recorded, **case)
        generation = sampling_time(plain)
        step(plain, 0), step(recorded, 0)
        ratios, shares, without = [], [], []
        for pair in range(1, pairs + 1):
            times = {}
            for on in (True, False) if pair % 2 else (False, True):
                inside.seconds = 0.0
                times[on] = sum(step(recorded if on else plain, pair))
                if on:
                    shares.append(inside.seconds / times[True])
                    without.append(inside.seconds / (times[True] - generation))
            ratios.append(times[True] / times[False])
        records = Path(folder, "records")
        files = [file for file in records.rglob("*") if file.is_file()]
        rows = len(read(records).table) if list(records.glob("*.parquet")) else 0
        return {
            "ratio_median": statistics.median(ratios),
            "ratio_interval": bootstrap(ratios),
            "share_median": statistics.median(shares),
            "share_median_without_generation": statistics.median(without),
            "generation_seconds": generation,
            "tokens_written_per_step": rows / (pairs + 1),
            "bytes_per_token": sum(file.stat().st_size for file in files) / rows if rows else None,
        }


def sampling_time(made) -> float:
    """Returns the median CPU seconds of TRL's generation."""
    prompts = ["a"] * SIZE["rows"]
    return statistics.median(cpu(lambda: made._generate(prompts)) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, inside = {}, Inside((RolloutRows, "name"), (StockRecord, "_add"))
    for name, case in CASES.items():
        if options.only in name:
            found[name] = one = measure(case, options.pairs, inside)
            print(f"{name}: {json.dumps(one)}", file=sys.stderr)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""Speed and memory of `trustrl audit` at 1, 10 and 100 million tokens.

    trustrl run tour schedule.updates_per_batch=8 records.sample=1 --out runs/adding
    python benchmarks/audit.py runs/adding/records [--millions 1 10 100] [--workers 2] [--verb bound]

The tokens do not come from runs of that size. The script repeats real records, adds a little noise to each log-prob of
the policy, recomputes the verdicts, and joins 64 answers of 4 tokens into a sequence of 256. It writes files of 100,000
rows, as a run with the default `max_rows_per_step` does, and deletes them afterwards. Each audit runs in a separate
process. CPU seconds and peak memory are the system's figures for that process, including start-up.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import trustrl
from trustrl.recording import read
from trustrl.recording.part_names import PartName
from trustrl.recording.record_writer import PartWriter
from trustrl.recording.sequence_tables import write_sequences
from trustrl.recording.token_rows import Rows

ROWS, LENGTH, JITTER = 100_000, 256, 0.02
REGION = trustrl.preset("dppo-binary-tv")
VERBS = {
    "audit": ["--regions", "ppo,gspo,dppo-binary-tv,dppo-binary-kl,dppo-topk-tv", "--json"],
    "calibrate": ["--json"],
    "bound": ["--json"],
}


def write(source: dict[str, torch.Tensor], folder: Path, step: int, rows: int) -> None:
    """Writes one part file with the library's writer, with verdicts that match its log-probs."""
    draw = torch.Generator().manual_seed(step)
    num = len(source["policy_logp"])
    at = (torch.arange(rows) + int(torch.randint(num, (), generator=draw))) % num
    columns = {name: x[at] for name, x in source.items()}
    logp = columns["policy_logp"] + JITTER * torch.randn(rows, generator=draw)
    columns["policy_logp"] = logp.clamp(max=0.0)
    sequence = torch.arange(rows) // LENGTH
    columns |= {"sequence": sequence + step * ROWS, "position": (torch.arange(rows) % LENGTH).int()}
    age = columns.pop("step") - columns["sampler_version"]
    columns["sampler_version"] = (step - age).int()
    rollout = trustrl.RolloutTokens(
        advantage=columns["advantage"], in_loss=torch.ones(rows, dtype=torch.bool),
        behavior_logp=columns["behavior_logp"],
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=columns["policy_logp"])
    decision = trustrl.policy_loss(policy, rollout, REGION, reduction=trustrl.TokenSum()).decision
    assert decision.divergence is not None
    columns |= {
        "kept": decision.keep, "weight": decision.weight.float(), "divergence_lower": decision.divergence.lower.float(),
        "divergence_upper": decision.divergence.upper.float(),
    }  # fmt: skip
    writer = PartWriter(folder, step=step, rank=0, region=trustrl.config_to_dict(REGION))
    writer.add(Rows(step, 0, 0, columns))
    writer.close(num_tokens=rows)
    rewards = [{"sequence": at, "reward": float(at % 2)} for at in columns["sequence"].unique().tolist()]
    write_sequences(folder, rewards, step=step, rank=0, text=False)


def measured(command: list[str]) -> dict[str, float]:
    """Runs a command and returns its wall seconds, CPU seconds and peak resident memory, including child processes."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} exited with code {os.waitstatus_to_exitcode(status)}.")
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_mb": used.ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 10, 100])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--verb", choices=tuple(VERBS), default="audit")
    parser.add_argument(
        "--distinct", type=int, default=10**9, help="number of files to write; the others are links to them"
    )
    parser.add_argument("--scratch", type=Path, help="folder for temporary files; 100 million tokens need 3 GB")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = read(options.records)
    dropped = ("kept", "weight", "update", "rank", "topk_ids", "topk_logp")
    source = {name: found[name] for name in found if name not in dropped}
    run = [sys.executable, "-m", "trustrl.cli", options.verb]
    nothing = measured([sys.executable, "-c", "import torch, trustrl.tools.audit, pyarrow.parquet"])
    results = [{"tokens": 0, "workers": 0, "load": os.getloadavg()[0], **nothing}]
    print(json.dumps(results[0]), file=sys.stderr, flush=True)
    folder = Path(tempfile.mkdtemp(dir=options.scratch, prefix="trustrl-audit-"))
    try:
        written = 0
        for millions in sorted(options.millions):
            tokens = int(millions * 1e6)
            while written < tokens:  # a larger set extends the smaller one
                rows, step = min(ROWS, tokens - written), written // ROWS
                if step < options.distinct:
                    write(source, folder, step, rows)
                else:
                    first = step % options.distinct
                    os.link(folder / str(PartName(first, first, 0)), folder / str(PartName(step, step, 0)))
                written += rows
            size = sum(file.stat().st_size for file in folder.iterdir())
            one = measured([*run, str(folder), *VERBS[options.verb], "--workers", str(options.workers)])
            extra = max(one["cpu_seconds"] - nothing["cpu_seconds"], 1e-9)
            results.append(
                {
                    "tokens": tokens,
                    "workers": options.workers,
                    "load": os.getloadavg()[0],
                    "disk_bytes_per_token": size / tokens,
                    **one,
                    "tokens_per_cpu_second": tokens / one["cpu_seconds"],
                    "tokens_per_cpu_second_without_start": tokens / extra,
                }
            )
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

"""Records of long runs on many ranks: files on disk, and the cost of opening them.

python benchmarks/long_record.py --ranks 64 --steps 10000 FOLDER

The recorder writes one rank, step by step, and merges as in a run. The other ranks are copies of its files with their
own rank and sequences, and the metrics are those of a stock TRL run. Then report, explain and watch open the folder,
each in a process. Prints one JSON object. `opened` counts the part files that a command opens, which no load changes.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

import trustrl
from trustrl.recording import Recorder, Recording, SequenceRows
from trustrl.recording.compaction import ROW_GROUPS, TABLE_FOLDERS
from trustrl.recording.part_names import PartName
from trustrl.recording.schema import writing
from trustrl.recording.storage import WholeFile

REGION = trustrl.preset("dppo-binary-tv")
SEQUENCES, LENGTH = 2, 4


def recorded(folder: Path, steps: int) -> dict[str, float]:
    """Records one rank. Returns CPU seconds, and the largest number of files while it ran."""
    recorder = Recorder(Recording(folder=folder, sample=1.0, ring_steps=2, triggers=()), REGION, rank=0)
    draw = torch.Generator().manual_seed(0)
    behavior = -torch.rand(SEQUENCES, LENGTH, generator=draw) - 0.1
    rollout = trustrl.RolloutTokens(
        behavior_logp=behavior, advantage=torch.tensor([1.0, -1.0]), token_ids=torch.arange(8).reshape(2, 4),
        in_loss=torch.ones(SEQUENCES, LENGTH, dtype=torch.bool),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=behavior + 0.1 * torch.randn(SEQUENCES, LENGTH, generator=draw))
    out = trustrl.policy_loss(policy, rollout, REGION, reduction=trustrl.TokenSum())
    most = 0
    began = time.process_time()
    for step in range(steps):
        ids = torch.arange(SEQUENCES * step, SEQUENCES * (step + 1))
        rows = SequenceRows(
            sequence=ids.tolist(), group=[0, 0], reward=[1.0, 0.0], completion_tokens=[LENGTH] * 2,
            prompt=["2 + 2 ="] * 2, completion=[" 4", " 5"],
        )  # fmt: skip
        recorder.add_sequences(rows, step=step)
        recorder.add(out, policy, rollout, sequences=ids, step=step)
        recorder.end_step(step, None)
        if step % 100 == 99:
            most = max(most, files_in(folder))
    assert recorder._writer is not None
    for _ in range(2):  # the merge under way, and blocks that ended meanwhile, as steps of seconds leave none
        if error := recorder._writer.wait():
            raise error
        recorder._writer.ended(steps - 1)
    return {"cpu_seconds": round(time.process_time() - began, 1), "most_files": most}


def files_in(folder: Path) -> int:
    """Returns the number of part files."""
    return sum(1 for _ in folder.rglob("step-*.parquet"))


def copied(folder: Path, rank: int, steps: int) -> None:
    """Writes the files of rank 0 again for another rank."""
    offset = rank * steps * SEQUENCES
    for name, inside in TABLE_FOLDERS.items():
        for file in (folder / inside).glob("step-*.rank-0000.parquet"):
            part = PartName.of(file.name)
            assert part is not None
            with pq.ParquetFile(file) as parquet:
                table, extra = parquet.read(), parquet.metadata.metadata
            columns: dict[str, Any] = dict(zip(table.column_names, table.columns, strict=True))
            columns["sequence"] = pc.add(columns["sequence"], offset)
            if "rank" in columns:
                columns["rank"] = pa.array([rank] * len(table), pa.int32())
            if "text" in columns:
                columns["text"] = pc.replace_substring(columns["text"], "rank-0000", f"rank-{rank:04d}")
            schema = table.schema
            whole = WholeFile(folder / inside / str(part._replace(rank=rank)))
            with pq.ParquetWriter(whole.target, schema, **writing(name)) as writer:
                writer.write_table(pa.table(list(columns.values()), schema=schema), row_group_size=ROW_GROUPS[name][0])
                keys = {key.decode(): extra[key] for key in (b"trustrl.step", b"trustrl.parts") if key in extra}
                writer.add_key_value_metadata(keys)
            whole.seal()
            whole.publish()


def with_metrics(folder: Path, steps: int) -> None:
    """Writes TRL's log of a run that learns, so that the tools have causes to look for."""
    history = [
        {
            "step": step, "reward": 0.2 + 0.5 * step / steps, "reward_std": 0.4, "frac_reward_zero_std": 0.1,
            "loss": 0.0, "grad_norm": 1.0, "entropy": 1.0 - 0.5 * step / steps, "completions/mean_length": 4.0,
            "num_tokens": float(step),
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip
    state = {"log_history": history, "logging_steps": 1, "max_steps": steps, "global_step": steps}
    (folder / "trainer_state.json").write_text(json.dumps(state))


COUNTED = """
import atexit, os, sys
opened = [0]
def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".parquet"):
        opened[0] += 1
sys.addaudithook(hook)
atexit.register(lambda: print(f"opened {opened[0]}", file=sys.stderr))
"""
"""Start of a program that says at its end how many part files it opened."""


def measured(arguments: list[str]) -> dict[str, Any]:
    """Returns exit code, CPU seconds, peak resident memory and opened part files of a command."""
    program = f"{COUNTED}\nfrom trustrl.cli import main\nsys.exit(main({arguments!r}))"
    return measured_program(program)


def measured_program(program: str) -> dict[str, Any]:
    """Returns the same of a Python program."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, used = os.wait4(process.pid, 0)
    said, _, opened = said.rstrip().rpartition("opened ")
    return {
        "opened": int(opened),
        "exit": os.waitstatus_to_exitcode(status), "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mb": round(used.ru_maxrss / 1024), "said": said[-300:],
    }  # fmt: skip


def main() -> None:
    """Makes the record, if the folder is empty, and measures the tools."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.folder / "records"
    results: dict[str, Any] = {"ranks": options.ranks, "steps": options.steps, "load": os.getloadavg()[0]}
    if not folder.exists():
        results["one_rank"] = recorded(folder, options.steps)
        for rank in range(1, options.ranks):
            copied(folder, rank, options.steps)
        with_metrics(options.folder, options.steps)
    results["files_without_merging"] = 3 * options.ranks * options.steps
    results["files"] = files_in(folder)
    results["mb"] = round(sum(file.stat().st_size for file in folder.rglob("*")) / 2**20)
    page = str(options.folder / "page.html")
    for name, arguments in {
        "help": ["--help"],
        "report": ["report", str(options.folder)],
        "report_page": ["report", str(options.folder), "--out", page],
        "explain": ["explain", str(options.folder)],
    }.items():
        results[name] = measured(arguments)
    call = f"live_reports([{str(options.folder)!r}], every=1.0, with_page=False)"
    once = f"from trustrl.tools.report.live_view import live_reports; next({call})"
    results["watch"] = measured_program(f"{COUNTED}\n{once}")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

"""A run of thousands of steps: memory, descriptors, threads and files of its process, at intervals."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from failures.faults import without_faults

STEPS, EVERY = 5000, 250
SETTINGS = (
    f"schedule.steps={STEPS}", "schedule.prompts_per_step=1", "schedule.completions_per_prompt=2",
    "schedule.updates_per_batch=1", "schedule.checkpoint_every=500", "evaluation.every=1000", "evaluation.count=16",
)  # fmt: skip


def measure(recipe: Path, folder: Path, settings: tuple[str, ...] = SETTINGS, every: int = EVERY) -> dict[str, Any]:
    """Runs the recipe and returns its samples and how it ended."""
    command = [sys.executable, "-m", "trustrl.cli", "run", str(recipe), *settings, "--out", str(folder)]
    began, samples, asked = time.monotonic(), [], 0
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=log, env=without_faults(os.environ), cwd=folder.parent
        )
    while process.poll() is None:
        step = _lines(folder / "metrics.jsonl")
        if step >= asked + every:
            asked = step
            with suppress(OSError):  # it may end meanwhile
                samples.append(
                    {"step": step, "seconds": round(time.monotonic() - began, 1), **_sample(process.pid, folder)}
                )
                print(f"long run: {samples[-1]}", file=sys.stderr, flush=True)
        time.sleep(1.0)
    lines = Path(log.name).read_text(errors="replace").splitlines()
    said = next((line for line in lines if line.startswith("error: ")), "")
    return {"code": process.returncode, "label": f"{STEPS:,} steps", "said": said, "samples": samples}


def _lines(file: Path) -> int:
    with suppress(FileNotFoundError), file.open("rb") as opened:
        return sum(1 for _ in opened)
    return 0


def _sample(pid: int, folder: Path) -> dict[str, Any]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    files = [one for one in folder.rglob("*") if one.is_file()]
    return {
        "rss_mb": round(int(status["VmRSS"].split()[0]) / 1024, 1),
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "files": len(files),
        "record_files": sum("records" in one.parts for one in files),
        "checkpoints": len(list((folder / "checkpoints").glob("checkpoint-*"))),
        "mb_on_disk": round(sum(one.stat().st_size for one in files) / 2**20, 1),
    }

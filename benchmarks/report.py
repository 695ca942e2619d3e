"""Time and size of `trustrl report --out` on records of a million tokens, and the time until Chromium has drawn them.

    python benchmarks/report.py [--tokens 1000000] [--length 256] [--repeats 3]

The script writes a run of 200 steps with the recorder's writers: 8 completions for each prompt, with texts and rewards.
The numbers are random. Each report runs in a separate process; CPU seconds and peak memory are the system's figures for
it, including start-up. The page is opened from its file in a new process of Chromium. The time until it is drawn is the
page's own clock (`performance.now()`) two frames after its script ended; it starts with the navigation.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import trustrl
from trustrl.recording.record_writer import PartWriter
from trustrl.recording.sequence_tables import write_sequences
from trustrl.recording.token_rows import Rows
from trustrl.runner.directory import RunDirectory
from trustrl.runner.recipe import load

STEPS, GROUP, VOCABULARY = 200, 8, 30_000
REGION = trustrl.preset("dppo-binary-tv")
DRAWN = "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(() => drawn(performance.now()))))"


def write_step(folder: Path, step: int, count: int, length: int) -> None:
    """Writes the tokens, sequences and texts of one step."""
    draw = torch.Generator().manual_seed(step)
    rows = count * length
    behavior = -torch.empty(rows).exponential_(1.5, generator=draw)
    moved = (behavior + 0.15 * torch.randn(rows, generator=draw)).clamp(max=0.0)
    rewards = (torch.rand(count, generator=draw) < 0.4).float()
    advantage = (rewards - 0.4).repeat_interleave(length)
    rollout = trustrl.RolloutTokens(
        advantage=advantage, in_loss=torch.ones(rows, dtype=torch.bool), behavior_logp=behavior
    )
    decision = trustrl.policy_loss(
        trustrl.PolicyTokens(logp=moved), rollout, REGION, reduction=trustrl.TokenSum()
    ).decision
    assert decision.divergence is not None
    sequence = step * 100_000 + torch.arange(count)
    columns = {
        "sequence": sequence.repeat_interleave(length), "position": torch.arange(length).repeat(count).int(),
        "token_id": torch.randint(VOCABULARY, (rows,), generator=draw).int(), "advantage": advantage,
        "behavior_logp": behavior, "proximal_logp": behavior + 1e-3 * torch.randn(rows, generator=draw),
        "policy_logp": moved, "weight": decision.weight.float(), "kept": decision.keep,
        "divergence_lower": decision.divergence.lower.float(), "entropy": torch.rand(rows, generator=draw),
    }  # fmt: skip
    writer = PartWriter(folder, step=step, rank=0, region=trustrl.config_to_dict(REGION))
    writer.add(Rows(step, 0, 0, columns))
    writer.close(num_tokens=rows)
    listed = [
        {
            "sequence": int(one), "group": at // GROUP, "completion_tokens": length, "reward": float(rewards[at]),
            "rewards": {"correct": float(rewards[at])}, "stop_reason": "stop", "prompt": f"Prompt {at // GROUP}",
            "completion": "word " * length,
        }
        for at, one in enumerate(sequence)
    ]  # fmt: skip
    write_sequences(folder, listed, step=step, rank=0, text=True)


def write_run(folder: Path, tokens: int, length: int) -> int:
    """Writes the run. Returns the number of tokens."""
    run = RunDirectory(folder)
    run.begin(load("tour"), resume=False)
    (folder / "records").mkdir()
    count = GROUP * -(-tokens // (STEPS * length * GROUP))
    for step in range(STEPS):
        write_step(folder / "records", step, count, length)
        run.append("metrics", {"step": step + 1, "reward": step / STEPS, "grad_norm": 1.0, "trustrl/kl_k3": 0.001})
    return STEPS * count * length


def report(folder: Path, out: Path) -> tuple[float, float, float]:
    """Returns the seconds on the clock and of CPU, and the peak memory in MB, of one report."""
    began = time.perf_counter()
    arguments = [sys.executable, "-m", "trustrl.cli", "report", str(folder), "--out", str(out)]
    silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    process = os.posix_spawn(sys.executable, arguments, os.environ, file_actions=silent)
    _, status, used = os.wait4(process, 0)
    if status:
        sys.exit("the report failed")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def open_page(out: Path) -> tuple[float, float]:
    """Returns the seconds until the page is drawn, and the CPU seconds of its process."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from support import browsing

    with browsing.started() as browser:
        tab = browsing.blank_tab(browser, (1440, 900))
        tab.goto(out.as_uri())
        drawn = tab.evaluate(DRAWN) / 1000
        session = tab.context.new_cdp_session(tab)
        session.send("Performance.enable")
        used = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    return drawn, used["ProcessTime"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, out = Path(scratch) / "run", Path(scratch) / "report.html"
        folder.mkdir()
        tokens = write_run(folder, options.tokens, options.length)
        files = sum(file.stat().st_size for file in folder.rglob("*.parquet"))
        print(f"{tokens:,} tokens in {files / 1e6:.1f} MB of records; load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        made = [report(folder, out) for _ in range(options.repeats)]
        seen = [open_page(out) for _ in range(options.repeats)]
        clock, cpu, memory = (median(column) for column in zip(*made, strict=True))
        drawn, used = (median(column) for column in zip(*seen, strict=True))
        found = {
            "tokens": tokens, "record_mb": files / 1e6, "report_seconds": clock, "report_cpu_seconds": cpu,
            "report_peak_mb": memory, "page_mb": out.stat().st_size / 1e6, "drawn_seconds": drawn,
            "page_cpu_seconds": used, "load": os.getloadavg()[0],
        }  # fmt: skip
        print(json.dumps({name: round(value, 2) for name, value in found.items()}, indent=1))


if __name__ == "__main__":
    main()

"""Failures with vLLM as TRL's sampler: a kill inside a weight sync, and the death of a vLLM server."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from failures import run_state
from failures.faults import without_faults
from failures.processes import lines

SETTINGS = (
    "sampler.kind=vllm", "schedule.steps=6", "schedule.checkpoint_every=2", "evaluation.count=16",
    "optimiser.learning_rate=5e-4",
)  # fmt: skip
PARAMETERS = 48
"""Parameters of one weight sync, roughly: kills are aimed into the second and later syncs."""

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}


def killed_in_sync(scratch: Path, recipe: Path, numbers: tuple[int, ...]) -> dict[str, Any]:
    """Kills TRL runs with a colocated vLLM inside a weight sync, and resumes them."""

    def run(folder: Path, number: int) -> tuple[int, str]:
        command = ["run", str(recipe), *SETTINGS, "--out", str(folder), "--resume"]
        process = _started(["sync", str(number), *command], scratch / "sync.log", **ENVIRONMENT)
        return process.wait(600), (scratch / "sync.log").read_text(errors="replace")

    reference, cases = scratch / "vllm-uninterrupted", []
    if not (reference / "result.json").exists():
        shutil.rmtree(reference, ignore_errors=True)
        code, said = run(reference, 0)
        if code:
            raise RuntimeError(said[-3000:])
    for number in numbers:
        folder = scratch / "vllm-killed"
        shutil.rmtree(folder, ignore_errors=True)
        code, _ = run(folder, number)
        logged = len(run_state.rows_of(folder, "metrics"))
        resume_code, said = run(folder, 0)
        after = re.findall(r"resuming after step (\d+)", said)
        done = int(after[-1]) if after else 0
        rows, whole = run_state.rows_of(folder, "metrics"), run_state.rows_of(reference, "metrics")
        same = [a["step"] for a, b in zip(rows, whole, strict=False) if a == b]
        cases.append(
            {
                "label": f"weight sync, parameter {number}", "code": code, "said": "", "resume_code": resume_code,
                "resumed_after": done, "lost_steps": max(0, logged - done), "steps": [row["step"] for row in rows],
                "same_steps": same, "different": _other_metrics(rows, whole),
                "gap_max": max(row.get("trustrl/gap_abs_mean", 0.0) for row in rows),
            }
        )  # fmt: skip
        print(f"weight sync: {json.dumps(cases[-1])}", file=sys.stderr, flush=True)
    return {"cases": cases}


def _other_metrics(rows: list[dict[str, Any]], whole: list[dict[str, Any]]) -> list[str]:
    """Returns the names of metrics that differ at any step."""
    if len(rows) != len(whole):
        return ["number of steps"]
    pairs = [(a, b) for a, b in zip(rows, whole, strict=True) if a != b]
    return sorted({name for a, b in pairs for name in {*a, *b} if a.get(name) != b.get(name)})


def server_killed(scratch: Path) -> dict[str, Any]:
    """Kills the vLLM server of a run in TRL's server mode, starts it again, and resumes the run."""
    folder = scratch / "server-run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    server, address = _server(scratch)
    try:
        process = _started(["server", str(folder), address], scratch / "client.log")
        deadline = time.monotonic() + 300
        while lines(folder / "metrics.jsonl") < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(server.pid, signal.SIGKILL)
        began = time.monotonic()
        code = process.wait(300)
        seconds, said = time.monotonic() - began, (scratch / "client.log").read_text(errors="replace")
        logged = lines(folder / "metrics.jsonl")
        server.wait()
        server, address = _server(scratch)
        resumed = _started(["server", str(folder), address], scratch / "client.log").wait(600)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
    steps = [row["step"] for row in run_state.rows_of(folder, "metrics")]
    errors = [line for line in said.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    state = run_state.state_after(folder)
    case = {
        "label": "vLLM server killed after step 3", "code": code, "said": (errors or [""])[-1][:400],
        "seconds_to_end": round(seconds, 1), "resume_code": resumed, "resumed_after": steps[logged] - 1,
        "lost_steps": logged - (steps[logged] - 1), "steps": steps, "unreadable": state["unreadable"],
        "recorded": state["recorded"],
    }  # fmt: skip
    print(f"server: {json.dumps(case)}", file=sys.stderr, flush=True)
    return {"cases": [case]}


def _started(arguments: list[str], log: Path, **environment: str) -> "subprocess.Popen[bytes]":
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "failures.vllm_process", *arguments], stdout=output, stderr=subprocess.STDOUT,
            env={**without_faults(os.environ), **environment}, cwd=log.parent,
        )  # fmt: skip


def _server(scratch: Path) -> tuple["subprocess.Popen[bytes]", str]:
    from trustrl.engines.vllm.gloo_transfer import BACKEND, EXTENSION
    from trustrl.world import models

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {
        "--host": "127.0.0.1", "--port": port, "--model": models.path("tiny"), "--dtype": "float32",
        "--max-model-len": 64, "--kv-cache-memory-bytes": 1 << 26, "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": f'{{"backend": "{BACKEND}"}}', "--worker-extension-cls": EXTENSION,
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [str(word) for pair in options.items() for word in pair]
    environment = {**without_faults(os.environ), "VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # a server's engine always has its own process
    log = scratch / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=scratch
        )
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{address}/health"):
            return process, address
        time.sleep(0.3)
    process.kill()
    raise RuntimeError(f"The server did not start:\n{log.read_text()[-3000:]}")

"""Failures of verl runs on Ray: one process is killed, or every object is spilled; then the run is resumed.

Each run is `trustrl run` with verl's `main_ppo` on the CPU and a sampler of transformers.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from failures import run_state
from failures.processes import Started, lines

STEPS, CHECKPOINT_EVERY, KILLED_AFTER = 6, 2, 3
SETTINGS = (
    f"schedule.steps={STEPS}", f"schedule.checkpoint_every={CHECKPOINT_EVERY}", "schedule.prompts_per_step=8",
    "schedule.completions_per_prompt=4", "schedule.updates_per_batch=1", "schedule.max_prompt_tokens=16",
    "schedule.max_completion_tokens=8", "evaluation.count=8", "task.problems=64", "records.sample=1",
)  # fmt: skip
VICTIMS = {
    "head": r"gcs_server",
    "sampler": r"^ray::TransformersServer",
    "trainer-rank": r"^ray::\S*(WorkerDict|actor_rollout)",
    "agent-loop-worker": r"^ray::\S*AgentLoopWorker",
}
"""Title of the process that each row kills."""

SPILLED = {
    "RAY_object_spilling_threshold": "0.0", "RAY_min_spilling_size": "1", "RAY_max_direct_call_object_size": "1",
    "RAY_verbose_spill_logs": "1",
}  # fmt: skip
"""Ray's settings that put every object into the object store and spill it to disk as soon as it is not in use."""

SPILLING = 1800.0
"""Seconds for a run that spills every object: it is many times slower."""

PATIENCE = 240.0
"""Seconds to wait for the end after a kill."""


class Runs:
    """Runs of one recipe in a scratch folder."""

    def __init__(self, scratch: Path, recipe: Path) -> None:
        self.scratch, self.recipe, self.reference = scratch, recipe, scratch / "verl-uninterrupted"

    def start(self, folder: Path, **environment: str) -> Started:
        """Starts a run that resumes if it can."""
        arguments = ["run", str(self.recipe), *SETTINGS, "--out", str(folder), "--resume"]
        return Started(arguments, self.scratch / f"{folder.name}.log", **environment)

    def uninterrupted(self) -> Path:
        """Returns the run that nobody killed. Makes it at the first call."""
        if not (self.reference / "result.json").exists():
            shutil.rmtree(self.reference, ignore_errors=True)
            done = self.start(self.reference).ended(900.0)
            if done.code:
                raise RuntimeError(done.said[-3000:])
        return self.reference

    def killed(self, victim: str) -> dict[str, Any]:
        """Kills one process after the third step, waits for the end, and resumes."""
        reference, folder = self.uninterrupted(), self.scratch / f"verl-{victim}"
        shutil.rmtree(folder, ignore_errors=True)
        started = self.start(folder)
        reached = started.wait_until(lambda: lines(folder / "metrics.jsonl") >= KILLED_AFTER, 900.0)
        found = _below(started.process.pid, VICTIMS[victim]) if reached else []
        for pid in found[:1]:
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        first = started.ended(PATIENCE)
        seconds = time.monotonic() - began
        _end(folder)
        logged = len(run_state.rows_of(folder, "metrics"))
        case = {
            "label": victim, "reached": bool(found), "code": first.code, "said": _said(first.said),
            "seconds_to_end": round(seconds, 1), "hung": seconds >= PATIENCE, "logged": logged,
        }  # fmt: skip
        return _report(case | self._resumed(folder, reference, logged))

    def _resumed(self, folder: Path, reference: Path, logged: int) -> dict[str, Any]:
        last = self.start(folder).ended(900.0)
        after = re.findall(r"resuming after step (\d+)", last.said)
        done = int(after[-1]) if after else 0
        rows, whole = run_state.rows_of(folder, "metrics"), run_state.rows_of(reference, "metrics")
        return {
            "resume_code": last.code, "resume_said": _said(last.said), "resumed_after": done,
            "lost_steps": max(0, logged - done), "steps": [row["step"] for row in rows],
            "same_until": _agreeing(rows, whole), "different": _different(folder, reference),
            "ratio_max": max((row.get("trustrl/ratio_max", 1.0) for row in rows), default=None),
        }  # fmt: skip

    def spilled(self) -> dict[str, Any]:
        """Runs with every object spilled to disk, and compares with the usual run."""
        reference, folder, spill = self.uninterrupted(), self.scratch / "verl-spilled", self.scratch / "ray"
        for one in (folder, spill):
            shutil.rmtree(one, ignore_errors=True)
        seen: set[str] = set()
        started = self.start(folder, **SPILLED, RAY_TMPDIR=str(spill))

        def watched() -> bool:
            seen.update(str(one) for one in spill.glob("**/ray_spilled_objects*/*"))
            return False

        started.wait_until(watched, SPILLING)
        began = time.monotonic()
        done = started.ended(30.0)
        hung = time.monotonic() - began >= 30.0
        logs = "".join(log.read_text(errors="replace") for log in spill.rglob("raylet.*"))
        objects = [int(one) for one in re.findall(r"Spilled \d+ MiB, (\d+) objects", logs)]
        case = {
            "label": "every object spilled", "code": done.code, "said": _said(done.said),
            "reached": bool(objects or seen), "hung": hung, "seconds_to_end": SPILLING,
            "spilled_files_seen": len(seen), "spilled_objects": max(objects, default=0),
            "steps": [row["step"] for row in run_state.rows_of(folder, "metrics")],
            "different": _different(folder, reference),
        }  # fmt: skip
        return _report(case)


def _agreeing(rows: list[dict[str, Any]], whole: list[dict[str, Any]]) -> int:
    """Returns the last step until which all metrics agree bit for bit."""
    same = 0
    for ours, theirs in zip(rows, whole, strict=False):
        if ours != theirs:
            break
        same = ours["step"]
    return same


def _different(folder: Path, reference: Path) -> list[str]:
    names = ("metrics", "evaluation")
    return [f"{name}.jsonl" for name in names if run_state.rows_of(folder, name) != run_state.rows_of(reference, name)]


def _below(root: int, pattern: str) -> list[int]:
    """Returns the descendants of a process whose title matches."""
    parents, titles = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(folder.name)
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            titles[pid] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")

    def descends(pid: int) -> bool:
        while pid in parents and pid != root:
            pid = parents[pid]
        return pid == root

    return [pid for pid, title in titles.items() if re.search(pattern, title) and descends(pid)]


def _end(folder: Path) -> None:
    """Kills what a run left running, found by the folder in its environment or command line."""
    mark = str(folder / "checkpoints").encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def _said(text: str) -> list[str]:
    kept = [line.strip() for line in text.splitlines() if re.search(r"^error:|warning:|resuming|Error: ", line)]
    return [line[:300] for line in dict.fromkeys(kept)][:6]


def _report(found: dict[str, Any]) -> dict[str, Any]:
    print(f"verl: {json.dumps(found, ensure_ascii=False)}", file=sys.stderr, flush=True)
    return found

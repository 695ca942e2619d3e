"""Other failures of TRL runs: full disks, clocks, two processes on one folder, and a killed comparison."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from failures import faults, forked, processes, run_state
from failures.forked import Ended
from failures.processes import Started, lines
from failures.trl_kills import World, in_fork

FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
ARMS = ("--regions", "dppo-binary-tv,ppo", "--seeds", "1")


def _report(row: str, found: dict[str, Any]) -> dict[str, Any]:
    print(f"{row}: {json.dumps(found, ensure_ascii=False)}", file=sys.stderr, flush=True)
    return found


def _last_words(ended: Ended) -> str:
    """Returns the error or warning of a run, or the last line of one that failed without."""
    chosen = [
        line.strip() for line in ended.said.splitlines()
        if line.startswith("error: ") or "Cannot write records" in line
    ]  # fmt: skip
    chosen = [line.rpartition("TrustRLWarning: ")[2] for line in chosen]
    return (chosen or ([ended.last_line] if ended.code else [""]))[-1]


def _compared(world: World, folder: Path) -> list[str]:
    return in_fork(lambda: run_state.differences(folder, world.reference), world.scratch)


def full_disk(world: World, what: str, part: str, share: float) -> dict[str, Any]:
    """Fails every write from one of the run's calls on, as a full disk does. Then resumes with room."""
    calls = [line for line in world.calls(part)[0] if " write" in line]
    number = int(calls[int(share * len(calls))].split()[0])
    folder = world.scratch / f"full-{what}"
    shutil.rmtree(folder, ignore_errors=True)
    world.log.unlink(missing_ok=True)
    first = forked.run(
        world.arguments(folder), world.scratch / "full.log", faults=faults.at_call(part, number, "full", world.log)
    )
    return _after_full_disk(world, what, folder, first)


def small_disk(world: World, megabytes: int) -> dict[str, Any]:
    """Puts the whole run on a file system with too little room, then gives it more and resumes."""
    disk = world.scratch / "disk"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "tmpfs", disk], check=True)
    try:
        folder = disk / "run"
        first = forked.run(world.arguments(folder), world.scratch / "full.log")
        subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
        return _after_full_disk(world, f"{megabytes} MB file system", folder, first)
    finally:
        subprocess.run(["umount", disk], check=True)


def _after_full_disk(world: World, what: str, folder: Path, first: Ended) -> dict[str, Any]:
    state = in_fork(lambda: run_state.state_after(folder), world.scratch)
    found = {
        "label": what, "code": first.code, "said": _last_words(first), "traceback": "Traceback" in first.said,
        "steps_logged": len(state["logged"]), "steps_recorded": len(state["recorded"]),
        "unreadable": state["unreadable"], "resume_code": None,
    }  # fmt: skip
    if first.code:
        last = forked.run(world.arguments(folder), world.scratch / "resumed.log")
        resumed = [line for line in last.said.splitlines() if "resuming after step" in line]
        found |= {"resume_code": last.code, "resume_said": resumed}
    finished = (folder / "result.json").exists()
    return _report("full disk", found | {"different": _compared(world, folder) if finished else ["not finished"]})


def clock(world: World, change: str) -> dict[str, Any]:
    """Changes the clock during a run, kills the run, changes it again for the resumption, and compares."""
    folder, now = world.scratch / f"clock{change}", world.scratch / "now"
    shutil.rmtree(folder, ignore_errors=True)
    now.write_text("+0\n")
    environment = {
        "LD_PRELOAD": str(FAKETIME[0]), "FAKETIME_TIMESTAMP_FILE": str(now), "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }  # fmt: skip
    started = Started(world.arguments(folder), world.scratch / "clock.log", **environment)
    reached = started.wait_until(lambda: lines(folder / "metrics.jsonl") >= 3)
    now.write_text(f"{change}\n")
    reached = reached and started.wait_until(lambda: lines(folder / "metrics.jsonl") >= 5)
    started.kill()
    first = started.ended()
    now.write_text(f"{change}\n")
    last = processes.run(world.arguments(folder), world.scratch / "clock.log", environment)
    seconds = [json.loads(line)["seconds"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return _report(
        "clock",
        {
            "label": f"clock {change} after step 3",
            "reached": reached,
            "code": first.code,
            "resume_code": last.code,
            "said": _last_words(last),
            "different": _compared(world, folder),
            "negative_seconds": min(seconds) < 0,
            "result_seconds": json.loads((folder / "result.json").read_text())["seconds"],
        },
    )


def two_processes(world: World) -> dict[str, Any]:
    """Starts two processes on one folder: a second one during a run, then two at the same moment."""
    folder = world.scratch / "shared"
    shutil.rmtree(folder, ignore_errors=True)
    first = Started(world.arguments(folder), world.scratch / "first.log")
    first.wait_until(lambda: lines(folder / "metrics.jsonl") >= 1)
    second = Started(world.arguments(folder), world.scratch / "second.log").ended()
    cases = [
        {
            "label": "a second process during a run", "code": second.code, "said": _last_words(second),
            "other_code": first.ended().code, "different": _compared(world, folder),
        }
    ]  # fmt: skip
    _report("two processes", cases[0])
    shutil.rmtree(folder)
    both = [Started(world.arguments(folder), world.scratch / f"{name}.log") for name in ("first", "second")]
    ends = sorted((one.ended() for one in both), key=lambda ended: ended.code)
    cases.append(
        {
            "label": "two processes at the same moment", "code": ends[1].code, "said": _last_words(ends[1]),
            "other_code": ends[0].code, "different": _compared(world, folder),
        }
    )  # fmt: skip
    _report("two processes", cases[1])
    return {"cases": cases}


def comparison(world: World) -> dict[str, Any]:
    """Kills `trustrl compare` in its first run, in its second run and with SIGINT, and runs the command again."""
    settings = ("schedule.steps=4", "schedule.checkpoint_every=2", "evaluation.count=16")

    def arguments(out: Path) -> list[str]:
        return ["compare", str(world.recipe), *settings, *ARMS, "--out", str(out)]

    reference = world.scratch / "compared"
    shutil.rmtree(reference, ignore_errors=True)
    whole = processes.run(arguments(reference), world.scratch / "compare.log")
    if whole.code:
        raise RuntimeError(whole.said[-2000:])
    cases = []
    moments = (("dppo-binary-tv", signal.SIGKILL), ("ppo", signal.SIGKILL), ("dppo-binary-tv", signal.SIGINT))
    for number, (region, sent) in enumerate(moments):
        out = world.scratch / f"compared-{number}"
        shutil.rmtree(out, ignore_errors=True)
        started = Started(arguments(out), world.scratch / "compare.log")
        rows = out / region / "seed-0" / "metrics.jsonl"
        reached = started.wait_until(lambda rows=rows: lines(rows) >= 3)
        started.kill(sent)
        first = started.ended()
        last = processes.run(arguments(out), world.scratch / "compare.log")
        cases.append(
            _report(
                "compare",
                {
                    "label": f"{signal.Signals(sent).name} in the run of {region}",
                    "reached": reached,
                    "code": first.code,
                    "said": _last_words(first) if sent == signal.SIGINT else "",
                    "resume_code": last.code,
                    "different": _other_tables(out, reference),
                },
            )
        )
    return {"cases": cases}


def _other_tables(out: Path, reference: Path) -> list[str]:
    tables = []
    for folder in (out, reference):
        found = json.loads((folder / "table.json").read_text())
        for run in found["runs"]:
            run["result"].pop("seconds", None)
        tables.append(found)
    return [] if tables[0] == tables[1] else [name for name in tables[0] if tables[0][name] != tables[1][name]]

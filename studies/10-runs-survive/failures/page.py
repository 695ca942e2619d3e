"""Tables of docs/reference/failures.md, made from docs/data/failures.json. Needs the standard library alone."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "shared"))
from pages import fill

ROOT = Path(__file__).parents[3]
DATA, PAGE = ROOT / "docs/data/failures.json", ROOT / "docs/reference/failures.md"
GUIDE = ROOT / "docs/guides/run.md"


class Row(NamedTuple):
    """Words of one row; the numbers come from the data."""

    failure: str
    engine: str
    ours: str
    each: bool = False
    """True to give each case a line of its own."""


NOTHING = "nothing: the process is gone"
CHECKPOINT = "the newest intact checkpoint; the unfinished one is set aside"
CLEANED = "the newest checkpoint; unfinished files are deleted"
REPEATED = "the newest checkpoint; later rows are deleted and made again"
ROOMLESS = "the last checkpoint; without room for records it trains on"
STOPS = "nothing: `main_ppo` stops"
ROWS = {
    "trl-checkpoint-write": Row("TRL: SIGKILL inside a checkpoint write", NOTHING, CHECKPOINT),
    "trl-record-write": Row("TRL: SIGKILL inside a record write", NOTHING, CLEANED),
    "trl-log-write": Row("TRL: SIGKILL inside a write of metrics or evaluations", NOTHING, REPEATED),
    "trl-evaluation": Row("TRL: SIGKILL during an evaluation", NOTHING, REPEATED),
    "trl-update": Row("TRL: SIGKILL before a backward pass or an optimizer step", NOTHING, REPEATED),
    "trl-rollout": Row("TRL: SIGKILL during a rollout (in-process sampler, no weight sync)", NOTHING, REPEATED),
    "trl-killed-twice": Row("TRL: SIGKILL in a checkpoint, and again during the resume", NOTHING, CHECKPOINT),
    "trl-random": Row("TRL: SIGKILL at a random time", NOTHING, REPEATED),
    "trl-term": Row("TRL: SIGTERM at a random time", NOTHING, REPEATED),
    "trl-int": Row("TRL: SIGINT at a random time", NOTHING, REPEATED),
    "vllm-weight-sync": Row("TRL: SIGKILL inside a weight sync to a colocated vLLM", NOTHING, REPEATED),
    "vllm-server": Row(
        "TRL's server mode: vLLM server killed", "retries the request, then raises",
        "records of all steps; resuming is TRL's own",
    ),
    "compare-killed": Row("`trustrl compare`", NOTHING, "finished runs; the open one is resumed", True),
    "trl-full-disk": Row("TRL: full disk", "raises", ROOMLESS, True),
    "trl-clock": Row("TRL, then SIGKILL", "does not read it", REPEATED, True),
    "trl-two-processes": Row("TRL, one folder", "would write both", "a lock refuses the second", True),
    "verl-head": Row("verl: Ray's head (GCS) killed", STOPS, REPEATED),
    "verl-sampler": Row("verl: sampler killed", STOPS, REPEATED),
    "verl-trainer-rank": Row("verl: trainer rank killed", STOPS, REPEATED),
    "verl-agent-loop-worker": Row("verl: agent-loop worker killed", "nothing: `main_ppo` waits", REPEATED),
    "verl-spilled": Row("verl: every object of Ray's store spilled to disk", "reads them back", "-"),
    "trl-long-run": Row("TRL: 5,000 steps", "-", "-"),
}  # fmt: skip
"""Rows in the order of the page."""


def table(data: Mapping[str, Any]) -> str:
    """Returns the matrix. A row without a run says so."""
    lines = [
        "| failure | runs | the engine recovers | trustrl recovers | lost at most | exit code and message "
        "| after the resume |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in ROWS.items():
        cases = data.get(name, {}).get("cases", [])
        if not cases:
            lines.append(f"| {row.failure} | not run | {row.engine} | {row.ours} | - | - | - |")
            continue
        for label, some in [(f": {case['label']}", [case]) for case in cases] if row.each else [("", cases)]:
            lines.append(
                f"| {row.failure}{label} | {len(some)} | {row.engine} | {row.ours} | {_lost(some)} | {_ends(some)} | "
                f"{_after(some)} |"
            )
    return "\n".join(lines)


def _lost(cases: Sequence[Mapping[str, Any]]) -> str:
    steps = [case["lost_steps"] for case in cases if case.get("lost_steps") is not None]
    if not steps:
        missing = max((case.get("steps_logged", 0) - case.get("steps_recorded", 0) for case in cases), default=0)
        return f"records of {missing} steps" if missing > 0 else "-"
    tokens = max((case.get("lost_tokens", 0) for case in cases), default=0)
    return f"{max(steps)} step{'s' * (max(steps) != 1)}" + (f", {tokens} tokens" if tokens else "")


def _ends(cases: Sequence[Mapping[str, Any]]) -> str:
    found: dict[tuple[int | str, str], int] = {}
    for case in cases:
        said = case.get("said") or ""
        said = said if isinstance(said, str) else ". ".join(one.rstrip(".:") for one in (said[0], *said[1:][-1:]))
        hung = f"no end within {case['seconds_to_end']:.0f} s, then killed" if case.get("hung") else None
        key = (hung or case["code"], _short(said))
        found[key] = found.get(key, 0) + 1
    return "; ".join(
        f"{'' if len(found) == 1 else f'{count} × '}{code}{f' `{said}`' if said else ', no message'}"
        for (code, said), count in found.items()
    )


def _short(said: str, longest: int = 160) -> str:
    """Returns a message for a cell of the table."""
    text = " ".join(said.replace("|", "/").replace("`", "'").split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _after(cases: Sequence[Mapping[str, Any]]) -> str:
    """Says how many runs ended like the uninterrupted one, and what differs in the others."""
    exact = sum(case.get("different") == [] for case in cases)
    other = dict.fromkeys(_short(one, 60) for case in cases for one in case.get("different", []))
    failed = sum(bool(case.get("resume_code")) for case in cases)
    broken = sum(bool(case.get("unreadable")) for case in cases)
    parts = [f"{exact} of {len(cases)} bit for bit"] if exact or len(cases) > 1 else []
    parts += [f"other {', '.join(other)}"] if other else []
    parts += [f"steps 1 to {cases[0]['steps'][-1]}"] if "steps" in cases[0] and not exact else []
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{broken} with unreadable records"] if broken else []
    return ", ".join(parts) or "-"


def kills(data: Mapping[str, Any]) -> str:
    """Returns the number of kills, those inside writes, and those after which the run ended bit for bit."""
    chosen = [(name, case) for name, row in data.items() if name.startswith("trl-") for case in row["cases"]]
    killed = [(name, case) for name, case in chosen if case.get("code") in (-9, -15) or name == "trl-int"]
    twice = sum(bool(case.get("second_code")) for _, case in killed)
    inside = sum(name in ("trl-checkpoint-write", "trl-record-write", "trl-killed-twice") for name, _ in killed)
    exact = sum(case.get("different") == [] for _, case in killed)
    return (
        f"{len(killed) + twice} kills of {len(killed)} TRL runs, {inside} of them first inside a checkpoint or record "
        f"write: {exact} of {len(killed)} runs ended like the uninterrupted one, bit for bit."
    )


def long_run(data: Mapping[str, Any]) -> str:
    """Returns the table of the long run."""
    cases = data.get("trl-long-run", {}).get("cases", [])
    if not cases:
        return "Not run."
    lines = [
        "| step | memory (MB) | threads | descriptors | files | of them records | checkpoints | disk (MB) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    samples = cases[0]["samples"]
    for one in samples[:: max(1, len(samples) // 10)]:
        lines.append(
            f"| {one['step']:,} | {one['rss_mb']:.0f} | {one['threads']} | {one['descriptors']} | {one['files']:,} | "
            f"{one['record_files']:,} | {one['checkpoints']} | {one['mb_on_disk']:.0f} |"
        )
    return "\n".join(lines)


def power(data: Mapping[str, Any]) -> str:
    """Returns the outcomes of the power failures."""
    row = data.get("power")
    if row is None:
        return "Not run."
    lines = ["| disk | crashes | exact | finished | refused, with names | from an older checkpoint | silent |"]
    lines.append("|---|---|---|---|---|---|---|")
    for disk, words in (("honest", "keeps what was synced"), ("lying", "loses synced files")):
        kinds = dict(row[disk])
        finished = kinds.pop("finished", 0) + kinds.pop("finished without rows", 0)
        columns = [kinds.get(kind, 0) for kind in ("exact", "refused", "older", "silent")]
        counts = [sum(kinds.values()) + finished, columns[0], finished, *columns[1:]]
        lines.append(f"| {words} | {' | '.join(f'{count:,}' for count in counts)} |")
    exact = sum(not case["different"] for case in row["resumed"])
    lost = row["lying"].get("finished without rows", 0)
    return "\n".join(lines) + (
        f"\n\n{len(row['resumed'])} of the states of the first disk were resumed to the end: {exact} ended like the "
        f"uninterrupted run, bit for bit. On the second disk, {lost} of the finished runs had a right `result.json` "
        "and had lost rows or record files."
    )


def cost(data: Mapping[str, Any]) -> str:
    """Returns the cost of the commit points."""
    row = data.get("power", {}).get("cost")
    if row is None:
        return "The cost was not measured."
    commit, manifest = (sorted(row[f"{name}_ms"]) for name in ("commit", "manifest"))
    return (
        "Steps without a checkpoint wait for no disk. A commit calls `fsync` once for each record file since the last "
        f"one and about 8 times more. A run of {row['steps']} steps, with {row['checkpoints']} checkpoints and three "
        f"record files a step, called it {row['fsyncs']} times in all, {row['fsync_ms']:.1f} ms each. At a checkpoint, "
        f"the run's files took {commit[len(commit) // 2]:.0f} ms and the checkpoint's own "
        f"{manifest[len(manifest) // 2]:.0f} ms (medians; a machine with two cores, busy with other work)."
    )


def write(data: Path = DATA, page: Path = PAGE, guide: Path = GUIDE) -> None:
    """Fills the pages from the data."""
    found = json.loads(data.read_text())
    for name, made in (("kills", kills), ("failures", table), ("power", power), ("long run", long_run)):
        fill(page, name, made(found))
    fill(guide, "commit cost", cost(found))

"""Power failures: the state of the disk after each is verified and repaired as `trustrl run --resume` does."""

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from failures import forked, run_state
from failures.crash_states import Trace, crashes, lies_outside_checkpoints, recorded
from failures.trl_kills import CHECKPOINT_EVERY, STEPS, World, in_fork
from trustrl.errors import TrustRLError
from trustrl.runner import directory as directories, trl_run
from trustrl.runner.commit_points import take_back
from trustrl.runner.directory import RunDirectory
from trustrl.runner.manifests import Seal
from trustrl.runner.recipe import Recipe, load
from trustrl.runner.signing import load_key

ROWS = ("metrics.jsonl", "evaluation.jsonl")


def files_of(run: Path) -> Callable[[], dict[str, bytes]]:
    """Returns a function that reads what a commit point covers: rows, and the files of the record."""

    def read() -> dict[str, bytes]:
        parts = [path for path in run.glob("records/**/step-*.parquet") if path.is_file()]
        return {
            path.relative_to(run).as_posix(): path.read_bytes() for path in (*(run / name for name in ROWS), *parts)
        }

    return read


class Outcome(NamedTuple):
    """Outcome of a resume from one state, without the training."""

    kind: str
    """exact, older (exact, but from an older checkpoint than the newest one that had reached the disk), refused, silent
    (accepted and wrong), finished, or finished without rows (result.json is right, and other files are lost)."""

    step: int
    said: str


def outcome(run: Path, recipe: Recipe, trace: Trace, point: int) -> Outcome:
    """Verifies and repairs a state of the disk as a resume does, and compares it with a commit point of the trace."""
    moments = {label: files for _, label, files in trace.marks}
    done, said = RunDirectory(run), []
    step = -1
    try:
        if done.finished:
            whole = done.result() == RunDirectory(trace.root).result()
            kind = "finished" if files_of(run)() == moments["finished"] else "finished without rows"
            return Outcome(kind if whole else "silent", recipe.schedule.steps, "")
        done.begin(recipe, resume=True, log=said.append)
        log: Any = SimpleNamespace(log=said.append)
        survey = trl_run.survey_of(recipe, done, log, Seal(load_key(said.append), done.run_id))
        take_back(done, survey.chosen, survey.step, None, said.append)
        step = survey.step
    except TrustRLError as error:
        return Outcome("refused", step, str(error))
    expected = moments[f"saved checkpoint-{step}"] if step else dict.fromkeys(ROWS, b"")
    accepted = all(_read(run / name) == content for name, content in expected.items())
    newest = max([int(label.rpartition("-")[2]) for at, label, _ in _saved(trace) if at <= point], default=0)
    kind = "silent" if not accepted else "older" if step < newest else "exact"
    return Outcome(kind, step, "; ".join(said))


def _saved(trace: Trace) -> list[tuple[int, str, dict[str, bytes]]]:
    return [mark for mark in trace.marks if mark[1].startswith("saved ")]


def _read(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


HONEST, LYING, RESUMED = 1200, 600, 36
"""Crashes on a disk that keeps its promise, crashes on one that loses synced files, and runs that are resumed."""


def power_failures(world: World) -> dict[str, Any]:
    """Traces a run, verifies and repairs the states after power failures, and resumes some of them to the end."""
    states = world.scratch / "states"
    shutil.rmtree(states, ignore_errors=True)
    states.mkdir()
    row = in_fork(lambda: _checked(world, states), world.scratch)
    resumed = []
    for folder in sorted(states.iterdir()):
        ended = forked.run(world.arguments(folder), world.scratch / "resumed.log")
        different = ["the resumption failed"]
        if not ended.code:
            different = in_fork(lambda folder=folder: run_state.differences(folder, world.reference), world.scratch)
        resumed.append({"label": folder.name, "code": ended.code, "different": different})
        print(f"power: {folder.name}: code {ended.code}, {different or 'exact'}", file=sys.stderr, flush=True)
    return {**row, "resumed": resumed, "cost": in_fork(lambda: _cost(world), world.scratch)}


def _checked(world: World, states: Path) -> dict[str, Any]:
    """Makes the trace and the states in this process, a fork."""
    run = world.scratch / "traced"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    files = files_of(run)
    marks = {"saved": (trl_run, "write_manifest", files), "finished": (RunDirectory, "finish", files)}
    with recorded(run, marks) as trace:
        _run(world, run)
    recipe, counts = load(run / "recipe.toml"), {}
    directories.environment = dict  # it takes longer than the checks
    for disk, number, lies in (("honest", HONEST, lambda path: False), ("lying", LYING, lies_outside_checkpoints)):
        kinds: Counter[str] = Counter()
        for index, crash in enumerate(crashes(trace, number, lies=lies)):
            state = world.scratch / "state"
            os.umask(0o022)
            crash.write(state)
            kept = disk == "honest" and index % (HONEST // RESUMED) == 0
            if kept:
                shutil.copytree(state, states / f"{index:04d} change {crash.point} {crash.way}")
            ended = outcome(state, recipe, trace, crash.point)
            kinds[ended.kind] += 1
            if ended.kind == "silent" or (disk == "honest" and ended.kind in ("refused", "older")):
                print(f"power: {disk} {crash.point} {crash.way}: {ended}", file=sys.stderr, flush=True)
        counts[disk] = dict(kinds)
        print(f"power: {disk}: {counts[disk]}", file=sys.stderr, flush=True)
    return {"changes": len(trace.changes), "syncs": sum(one.kind == "sync" for one in trace.changes), **counts}


def _run(world: World, run: Path) -> None:
    from trustrl.cli import main

    if main(world.arguments(run)):
        raise RuntimeError("The run must end well.")


def _cost(world: World) -> dict[str, Any]:
    """Counts the calls of fsync in a run and measures its commits, without a trace."""
    run = world.scratch / "costed"
    shutil.rmtree(run, ignore_errors=True)
    spent: dict[str, list[float]] = {"fsync": [], "commit": [], "manifest": []}

    def timed(label: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent[label].append(time.perf_counter() - began)

        return call

    os.fsync = timed("fsync", os.fsync)
    trl_run._commit = timed("commit", trl_run._commit)
    trl_run.write_manifest = timed("manifest", trl_run.write_manifest)
    _run(world, run)
    return {
        "steps": STEPS, "checkpoints": STEPS // CHECKPOINT_EVERY, "fsyncs": len(spent["fsync"]),
        **{f"{label}_ms": [round(1000 * x, 2) for x in spent[label]] for label in ("commit", "manifest")},
        "fsync_ms": round(1000 * sum(spent["fsync"]) / len(spent["fsync"]), 3),
    }  # fmt: skip

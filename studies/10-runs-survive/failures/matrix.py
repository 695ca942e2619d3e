"""Rows of the matrix: makes each, and keeps the results in docs/data/failures.json."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from failures import faults, forked, long_run, power_rows, trl_kills, trl_rows, verl_rows, vllm_rows

ROOT = Path(__file__).parents[3]
DATA = ROOT / "docs/data/failures.json"
RECIPE = ROOT / "recipes/sanity.toml"


def results() -> dict[str, Any]:
    """Returns the results so far, by row."""
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def make(scratch: Path, only: Sequence[str], *, again: bool) -> None:
    """Makes the rows that are not in the data yet, and writes the data after each."""
    known = dict(rows(scratch))
    unknown = [name for name in only if name not in known]
    if unknown:
        raise SystemExit(f"Unknown rows: {', '.join(unknown)}. Known: {', '.join(known)}.")
    for name in only or known:
        if name in results() and not again:
            print(f"{name}: in the data already", file=sys.stderr)
            continue
        began = time.monotonic()
        found = known[name]()
        row = {"seconds": round(time.monotonic() - began, 1), "versions": _versions(), **found}
        text = json.dumps({**results(), name: row}, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        DATA.write_text(text.replace(str(scratch), "runs").replace(f"{ROOT}/", ""))


def rows(scratch: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields every row with the function that makes it."""

    @cache
    def world() -> trl_kills.World:
        return _world(scratch)

    @cache
    def verl() -> verl_rows.Runs:
        return verl_rows.Runs(scratch, ROOT / "recipes/verl-tour.toml")

    for name, kills in trl_kills.ROWS.items():
        yield name, lambda name=name, kills=kills: {"cases": trl_kills.made(world(), name, kills(world()))}
    yield (
        "trl-full-disk",
        lambda: {
            "cases": [
                trl_rows.full_disk(world(), "checkpoint", "/checkpoints/", 0.5),
                trl_rows.full_disk(world(), "records", "/records", 0.5),
                trl_rows.full_disk(world(), "logs", "metrics.jsonl", 0.5),
                trl_rows.small_disk(world(), 20),
            ]
        },
    )
    yield "trl-clock", lambda: {"cases": [trl_rows.clock(world(), change) for change in ("-2d", "+30d")]}
    yield "trl-two-processes", lambda: trl_rows.two_processes(world())
    yield "compare-killed", lambda: trl_rows.comparison(world())
    yield "power", lambda: power_rows.power_failures(world())
    for victim in verl_rows.VICTIMS:
        yield f"verl-{victim}", lambda victim=victim: {"cases": [verl().killed(victim)]}
    yield "verl-spilled", lambda: {"cases": [verl().spilled()]}
    yield "vllm-weight-sync", lambda: vllm_rows.killed_in_sync(scratch, RECIPE, (60, 200, 250))
    yield "vllm-server", lambda: vllm_rows.server_killed(scratch)
    yield "trl-long-run", lambda: {"cases": [long_run.measure(RECIPE, scratch / "long")]}


def _world(scratch: Path) -> trl_kills.World:
    """Makes the uninterrupted run in a process without the shim, then imports what runs import."""
    world = trl_kills.World(scratch, RECIPE)
    if not (world.reference / "result.json").exists():
        subprocess.run(
            [sys.executable, "-m", "trustrl.cli", *world.arguments(world.reference)],
            env=faults.without_faults(os.environ), check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    shutil.rmtree(scratch / "imports", ignore_errors=True)  # a finished run would import little
    modules = forked.import_all(scratch, world.arguments(scratch / "imports"))
    threads = len(os.listdir("/proc/self/task"))
    print(f"imported {modules} modules, {threads} threads", file=sys.stderr, flush=True)
    return world


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "trl", "verl", "ray", "vllm", "pyarrow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

"""Runner of the second study. Start it again to resume: it skips finished runs.

    python studies/02-which-learns-most/run.py --stage tune --processes 2
    python studies/02-which-learns-most/run.py --stage decide --processes 2
    python studies/02-which-learns-most/run.py --stage anchors --processes 2
    python studies/02-which-learns-most/run.py --stage updates-tune --processes 2
    python studies/02-which-learns-most/run.py --stage updates --processes 2
    python studies/02-which-learns-most/run.py --stage cap-tune --processes 2
    python studies/02-which-learns-most/run.py --stage cap --processes 2
    python studies/02-which-learns-most/run.py --stage cap-size --processes 2

Each finished run is one line of docs/results/data/evidence2-STAGE.jsonl. Only this process writes the file, so an
interruption loses the runs in progress and nothing else.
"""

import argparse
import json
import os
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context

import synonym_world
import torch
from study import PREPARATION, STAGES, file_of, label, plan, read
from synonym_training import Run, train

MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""glibc's limits above which freed memory goes back to the system. Each matrix of logits would be mapped anew."""


def _prepare(parent: int) -> None:
    """Prepares a process: one thread for torch, and an end if its parent ends first, by whatever signal."""
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def key(run: dict) -> tuple[str, str, int]:
    """Returns the parts of a result that name the run."""
    return run["name"], label(run), run["seed"]


def remaining(stage: str, arms: list[str] | None) -> list[Run]:
    """Returns the planned runs that have no result yet, and drops a line that an interruption cut off."""
    finished, path = read(stage), file_of(stage)
    if path.exists() and not path.read_text().endswith("\n"):
        path.write_text("".join(json.dumps(run) + "\n" for run in finished))
    done = {key(run) for run in finished}
    return [run for run in plan(stage, arms) if key(run.as_dict()) not in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stage", choices=(*PREPARATION, *STAGES), required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--arms", help="Comma-separated arms. All by default.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="Start no run after this time.")
    given = parser.parse_args()
    synonym_world.start()  # makes the start once, before the processes need it
    until = time.monotonic() + 60 * given.minutes
    for name in MALLOC:
        os.environ.setdefault(name, str(2**32))
    while left := remaining(given.stage, given.arms.split(",") if given.arms else None):  # tuning has two rounds
        run_all(given.stage, left, given.processes, until)
        if time.monotonic() >= until:
            break


def run_all(stage: str, left: list[Run], processes: int, until: float) -> None:
    """Runs what is left of a stage, and starts none after the time `until`."""
    total, done = len(left), 0
    running: set[Future] = set()
    with (
        file_of(stage).open("a") as results,
        ProcessPoolExecutor(processes, get_context("spawn"), _prepare, (os.getpid(),)) as pool,
    ):
        while running or (left and time.monotonic() < until):
            while left and len(running) < processes and time.monotonic() < until:
                running.add(pool.submit(train, left.pop(0)))
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for one in finished:
                run = one.result()
                results.write(json.dumps(run) + "\n")
                results.flush()
                done += 1
                print(
                    f"{done} of {total}: {run['name']} {label(run)} seed {run['seed']}, area {run['auc']:.4f}, "
                    f"{run['cpu_seconds']:.0f} s",
                    file=sys.stderr,
                )


if __name__ == "__main__":
    main()

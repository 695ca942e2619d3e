"""Makes the runs of `seeded_runs.py` or of `faults.py`, and skips those that are done.

    python studies/06-fault-found/seeded.py RUNS --edition 3 --trl PYTHON --verl PYTHON [--engine trl] [--only NAME ...]

Runs on TRL of the third edition are forks of one process; every other run is a process of its own. Each engine has an
environment of its own: name its interpreter. A run ends with a file `<name>.done` that contains the exit code and the
seconds, whatever the code. A run that was interrupted begins again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from faults import ALL, FAULTS, ORDER
from seeded_runs import RUNS

HERE = Path(__file__).parent
LIMIT = 1200
NOT_STARTED, TRIES = "The current node timed out during startup", 5
"""Ray's message if a busy machine does not start it within 30 s. No step was taken, so the run begins again."""


def make(name: str, folder: Path, python: str) -> None:
    """Makes one run and writes the file that marks it."""
    began = time.time()
    for _ in range(TRIES):
        code = attempt(name, folder, python)
        if NOT_STARTED not in (folder / f"{name}.log").read_text(errors="replace"):
            break
    done = {"code": code, "seconds": round(time.time() - began)}
    (folder / f"{name}.done").write_text(json.dumps(done))
    print(name, done, file=sys.stderr, flush=True)


def attempt(name: str, folder: Path, python: str) -> int:
    """Starts one run and returns its exit code."""
    engine = ALL[name].engine.removeprefix("stock ")
    shutil.rmtree(folder / name, ignore_errors=True)
    with (folder / f"{name}.log").open("w") as log:
        command = [python, "-W", "ignore", str(HERE / f"seeded_{engine}.py"), name, str(folder / name)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--engine", nargs="+", choices=["trl", "verl"], default=["trl", "verl"])
    parser.add_argument("--trl", default=sys.executable, help="Python with TRL and vLLM")
    parser.add_argument("--verl", default=sys.executable, help="Python with verl")
    parser.add_argument("--edition", type=int, choices=[2, 3], default=3)
    parser.add_argument("--only", nargs="+", choices=list(ALL), metavar="NAME")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    wanted = options.only or list(ORDER if options.edition == 3 else RUNS)
    forked = [name for name in wanted if name in FAULTS and ALL[name].engine == "stock trl"]
    if forked and "trl" in options.engine:
        command = [options.trl, "-W", "ignore", str(HERE / "faulty_trl.py"), str(options.runs), "--only", *forked]
        subprocess.run(command, check=True)
    for name in wanted:
        engine = ALL[name].engine.removeprefix("stock ")
        if name not in forked and engine in options.engine and not (options.runs / f"{name}.done").exists():
            make(name, options.runs.resolve(), getattr(options, engine))


if __name__ == "__main__":
    main()

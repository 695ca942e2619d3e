"""Failure matrix: makes every failure, resumes, compares, and writes docs/data/failures.json and its page.

    PYTHONPATH=studies/10-runs-survive python -m failures run [--only ROW ...] [--again]    # in the environment of TRL
    PYTHONPATH=studies/10-runs-survive python -m failures page

A row that is in the data already is skipped without `--again`, so an interrupted command continues. Progress is on
stderr. How each kind is made:

- Inside a write. A library in `LD_PRELOAD` (`shim.c`) counts the calls that change files below a folder and kills the
  process at a chosen one, every second time after half of the bytes were written. The calls are spread evenly over
  all checkpoints or records of the run.
- TRL runs. `recipes/sanity.toml` with 8 steps, 2 updates per batch, a checkpoint every 2 steps and every token
  recorded, on the CPU. Killed and resumed runs are forks of a process that has imported TRL; the uninterrupted run is
  a separate process.
- Full disk. The same library answers `ENOSPC` from one call on, for the checkpoint, the records or the metrics; the
  last case is a real file system of 20 MB. A run whose records cannot be written warns and trains on. Records of
  whole steps are lost until there is room again; a warning then counts their tokens and sequences.
- Clock. libfaketime moves the clock after step 3; the run is killed after step 5 and resumed with the moved clock.
- vLLM. A colocated vLLM on the CPU draws from torch's random state, which the checkpoint restores, so the samples
  agree. The two metrics that differ compare vLLM with itself in the first rollout of a process. A vLLM server
  continues with other samples. TRL sends weights to a server with NCCL, which needs GPUs; here trustrl's gloo channel
  sends them, from a script, because recipes do not offer TRL's server mode.
- verl. `recipes/verl-tour.toml` with 6 steps, a checkpoint every 2 and one update per batch, on the CPU with a
  sampler of transformers, killed after step 3. Every run differs from the uninterrupted one from step 1 on, before
  any kill; the likely cause, not tested, is a sampler that draws from one random stream as requests arrive. verl also
  evaluates once more at the step from which it resumes. If an agent-loop worker dies, verl waits for its answers; we
  ended the run after 240 s, and `trustrl run` warns after ten minutes without a step.
- Spilled objects. Settings of Ray put every object into its store and spill it to disk at once. On a busy machine the
  run had made 5 of 6 steps and spilled 3,107 objects when we ended it. We did not measure its resume.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from failures import faults, matrix, page

ROOT = Path(__file__).parents[3]


def main() -> None:
    parser = argparse.ArgumentParser(prog="failures", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("run", "page", "list"))
    parser.add_argument("--only", nargs="*", default=[], help="Names of rows")
    parser.add_argument("--again", action="store_true", help="Make rows that are in the data again")
    parser.add_argument("--scratch", type=Path, help="Folder for the runs (default: a temporary one)")
    options = parser.parse_args()
    if options.what == "page":
        page.write()
    elif options.what == "list":
        print("\n".join(dict(matrix.rows(Path()))))
    elif options.scratch is not None:
        options.scratch.mkdir(parents=True, exist_ok=True)
        run(options.scratch.resolve(), options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), options)


def run(scratch: Path, options: argparse.Namespace) -> None:
    """Makes the chosen rows. Starts this program again with the shim if it was started without."""
    if "LD_PRELOAD" not in os.environ:
        library = faults.compiled(scratch)
        key = scratch / "key"  # not the user's
        more = {"LD_PRELOAD": str(library), "TRUSTRL_KEY_FILE": str(key)}
        command = [sys.executable, "-m", "failures", *sys.argv[1:], "--scratch", str(scratch)]
        sys.exit(subprocess.run(command, env={**os.environ, **more}, check=False).returncode)
    matrix.make(scratch, options.only, again=options.again)


if __name__ == "__main__":
    main()
